"""A key-value store for several ranks in one process, which never waits."""


class KeyStore(dict):
    """Stands for PyTorch's store where ranks are threads, or take turns."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)
