"""Pack a dataset: encode samples and write shards, in a form that can be continued."""
