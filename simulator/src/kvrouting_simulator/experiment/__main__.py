"""`python -m kvrouting_simulator.experiment`."""

from kvrouting_simulator.experiment.command import simulate

if __name__ == "__main__":
    simulate()
