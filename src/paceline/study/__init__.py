"""Experiments on the machine itself: started over its hosts, measured, and gathered."""
