"""`python -m kvrouting_simulator.study`."""

from kvrouting_simulator.study.command import experiments

if __name__ == "__main__":
    experiments()
