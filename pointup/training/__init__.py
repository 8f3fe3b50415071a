"""What train.py stands on; besides apps, the only room that knows Accelerate."""
