"""`python -m kvrouting_sidecar`."""

from kvrouting_sidecar.command import sidecar

if __name__ == "__main__":
    sidecar()
