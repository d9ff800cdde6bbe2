"""The recorder: what every rank did when, written so that it survives the rank."""
