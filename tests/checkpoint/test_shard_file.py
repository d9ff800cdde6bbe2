"""How the shard of a rank is written: blocks, checksums, and the memory of the copies."""

import errno
import os

import pytest
import torch
from crc32c import crc32c

from paceline.checkpoint import checkpoint_folder
from paceline.checkpoint.checkpoint_folder import BLOCK_BYTES, PENDING_BYTES, ShardFile
from paceline.checkpoint.saver import StagingMemory

SIZES = (
    [1, 2, 3],
    [BLOCK_BYTES, 5, BLOCK_BYTES - 5, 3 * BLOCK_BYTES],
    [PENDING_BYTES + 7, 1, 2 * PENDING_BYTES],
    [7, BLOCK_BYTES - 7, PENDING_BYTES * 5 + 9, BLOCK_BYTES],
    [],
)


def pieces(sizes, offset):
    """Return writable memory of these sizes, each at ``offset`` bytes from a page."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        pages = torch.empty(size + 2 * BLOCK_BYTES, dtype=torch.uint8)
        start = -pages.data_ptr() % BLOCK_BYTES + offset
        piece = pages[start : start + size].random_(generator=generator)
        found.append(memoryview(piece.numpy()))
    return found


def write_all(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        file = ShardFile(fd)
        for one in data:
            assert file.write(one) == len(one)
        file.finish()
    finally:
        os.close(fd)
    return file


@pytest.mark.parametrize("system", ["direct", "buffered", "refused"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_bytes_and_checksum_are_those_that_were_written(
    tmp_path, monkeypatch, sizes, offset, system
):
    if system == "buffered":
        monkeypatch.setattr(checkpoint_folder, "file_system_type", lambda _: "nfs")
    if system == "refused":  # a file system that takes the flag and not the writes
        monkeypatch.setattr(checkpoint_folder, "file_system_type", lambda _: "ext4")
        write, flags = os.write, checkpoint_folder.fcntl.F_GETFL

        def refusing(fd, data):
            if checkpoint_folder.fcntl.fcntl(fd, flags) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return write(fd, data)

        monkeypatch.setattr(checkpoint_folder.os, "write", refusing)
    data = pieces(sizes, offset)
    file = write_all(tmp_path / "shard", data)
    expected = b"".join(data)
    assert (tmp_path / "shard").read_bytes() == expected
    assert (file.bytes, file.crc) == (len(expected), crc32c(expected))


def test_write_that_ends_within_a_block_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "file_system_type", lambda _: "ext4")
    write = os.write
    monkeypatch.setattr(
        checkpoint_folder.os, "write", lambda fd, data: write(fd, data[:BLOCK_BYTES])
    )
    data = pieces([5 * BLOCK_BYTES + 100], 0)
    write_all(tmp_path / "shard", data)
    assert (tmp_path / "shard").read_bytes() == bytes(data[0])


def test_full_disk_is_an_error_of_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    fd = os.open(tmp_path / "shard", os.O_WRONLY | os.O_CREAT)
    file = ShardFile(fd)
    monkeypatch.setattr(checkpoint_folder.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(pieces([PENDING_BYTES], 1)[0])
    assert file.error.errno == errno.ENOSPC
    os.close(fd)


def test_copies_have_storages_of_their_own_and_memory_is_used_again():
    memory = StagingMemory()
    large = torch.randn(100, 400)
    tensors = [large, torch.ones(3), large.t(), large.to(torch.bfloat16), torch.eye(3).to_sparse()]
    copies = memory.copy(tensors)
    for one, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.shape) == (one.dtype, one.shape)
        assert torch.equal(copy.to_dense(), one.to_dense())
    assert copies[0].untyped_storage().nbytes() == large.nbytes
    first = copies[0].data_ptr()
    assert first % BLOCK_BYTES == 0
    large.zero_()
    assert copies[0].any()
    assert memory.copy(tensors)[0].data_ptr() == first


def test_staging_memory_is_freed_when_a_save_needs_less_than_half_of_it():
    memory = StagingMemory()
    memory.copy([torch.ones(1 << 20)])
    memory.copy([torch.ones(1 << 18)])
    assert len(memory._memory) == 1 << 20
