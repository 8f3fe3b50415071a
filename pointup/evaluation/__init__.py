"""Evaluation of upsampled clouds: pairs, shapes by the PU-GCN protocol, and lidar surveys."""
