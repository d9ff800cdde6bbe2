"""What a study is made for: the time to a target, and a comparison with another study."""
