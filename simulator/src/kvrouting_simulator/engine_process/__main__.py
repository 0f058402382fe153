"""`python -m kvrouting_simulator.engine_process`."""

from kvrouting_simulator.engine_process.command import engine

if __name__ == "__main__":
    engine(auto_envvar_prefix="KVROUTING_ENGINE")
