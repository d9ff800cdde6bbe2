"""Line profile of an experiment: which line of the user's code each moment belongs to."""
