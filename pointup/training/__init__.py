"""Training, as train.py runs it. Only this package and `pointup.cli` import Accelerate."""
