"""From recorded decisions and their outcomes to the step times of the workers that served them."""

from kvrouting_simulator.calibration.class_fit import Calibration, CalibrationError, calibrate
from kvrouting_simulator.calibration.observations import Observation, observed_records, read_decisions

__all__ = ["Calibration", "CalibrationError", "Observation", "calibrate", "observed_records", "read_decisions"]
