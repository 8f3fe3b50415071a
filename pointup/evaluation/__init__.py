"""Measuring predictions: pairs, the field's shape protocol, and lidar surveys."""
