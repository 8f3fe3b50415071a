"""How fast this machine plans, reads, searches, trains and upsamples."""
