"""The tuner of DDP's exchange: a model of what it costs first, then the first steps of the job."""
