"""Rules that name a cause, by what it is about. Each gets all the evidence, and says an id, a
sentence and the figures that it rests on; None where nothing explains what was measured."""
