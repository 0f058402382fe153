"""How good the router's predictions are: error, bias, calibration, and regret against hindsight."""
