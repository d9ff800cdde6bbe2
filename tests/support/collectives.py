"""Scripts whose ranks call collectives, on one host or on several."""

# Every rank can compute the tensors of all ranks, and therefore the result of each collective.
ANY = """
    import random, sys
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert type(dist.group.WORLD).__name__ == "SharedMemoryGroup"
    draw = random.Random(int(sys.argv[1]))
    roundings = int(sys.argv[3]) if len(sys.argv) > 3 else 1  # of numbers of 16 bits
    FLOATS = {torch.float32: 2**-24, torch.float64: 2**-53, torch.float16: 2**-11,
              torch.bfloat16: 2**-8}
    INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    OPS = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MIN: torch.amin,
           dist.ReduceOp.MAX: torch.amax}

    def vector(shape, dtype, of, seed):
        generator = torch.Generator().manual_seed(1000 * seed + of)
        if dtype in FLOATS:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, 100, shape, generator=generator, dtype=dtype)

    def reduced(each, op):
        all_ = torch.stack([x.double() if x.dtype in FLOATS else x.long() for x in each])
        return OPS[op](all_, 0), all_.abs().sum(0)

    def check(found, each, op):
        expected, most = reduced(each, op)
        if found.dtype in FLOATS:
            half = found.dtype in (torch.float16, torch.bfloat16)
            bound = 1.5 * roundings if half else size
            off = (found.double() - expected).abs()
            fits = off <= bound * FLOATS[found.dtype] * most + 1e-7
            assert fits.all(), (found.dtype, off.max())
        else:
            torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0)

    for seed in range(int(sys.argv[2])):
        kind = draw.choice(["reduce", "reduce", "scatter", "gather", "list", "broadcast",
                            "barrier"])
        dtype = draw.choice([*FLOATS, *INTEGERS])
        shape = draw.choice([(), (1,), (3, 5), (draw.randrange(5000),),
                             (draw.randrange(300_000, 900_000),)])
        op, later = draw.choice(list(OPS)), draw.random() < 0.5
        each = [vector(shape, dtype, of, seed) for of in range(size)]
        mine, root = each[rank].clone(), draw.randrange(size)
        if draw.random() < 0.2 and len(shape) == 2:
            mine = mine.t().contiguous().t()  # not one piece of memory in this order
        work, look = None, None
        if kind == "reduce":
            work = dist.all_reduce(mine, op, async_op=later)
            look = lambda found=mine, each=each, op=op: check(found, each, op)
        elif kind == "scatter" and shape:
            whole = [torch.cat([vector(shape, dtype, 100 * of + to, seed) for to in range(size)])
                     for of in range(size)]
            found = torch.empty_like(mine)
            work = dist.reduce_scatter_tensor(found, whole[rank], op, async_op=later)
            look = lambda found=found, whole=whole, op=op: check(
                found, [one.chunk(size)[rank] if one.numel() else one for one in whole], op)
        elif kind == "gather" and shape:
            found = torch.empty(size * shape[0], *shape[1:], dtype=dtype)
            work = dist.all_gather_into_tensor(found, mine, async_op=later)
            look = lambda found=found, each=each: torch.testing.assert_close(
                found, torch.cat(each), rtol=0, atol=0)
        elif kind == "list":
            found = [torch.empty_like(mine) for _ in range(size)]
            work = dist.all_gather(found, mine, async_op=later)
            look = lambda found=found, each=each: torch.testing.assert_close(
                found, each, rtol=0, atol=0)
        elif kind == "broadcast":
            work = dist.broadcast(mine, root, async_op=later)
            look = lambda found=mine, whole=each[root]: torch.testing.assert_close(
                found, whole, rtol=0, atol=0)
        else:
            work = dist.barrier(async_op=later)
        if work is not None:
            work.wait()
        if look is not None:
            look()
    print(rank, "all as expected", flush=True)
    dist.destroy_process_group()
    """

SAME = """
    import sys
    import torch, torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1_000_003)
    dist.all_reduce(x)
    each = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(each, x)
    assert all(torch.equal(x, one) for one in each)
    if dist.get_rank() == 0:
        torch.save(x, sys.argv[1])
    dist.destroy_process_group()
    """

TRAINS = """
    import contextlib, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import paceline

    class Branches(torch.nn.Module):  # rank 0 takes one of them; the last one is nobody's
        def __init__(self):
            super().__init__()
            self.all = torch.nn.ModuleList(torch.nn.Linear(64, 90) for _ in range(4))

        def forward(self, x):
            return self.all[0](x) + sum(one(x).sum() for one in self.all[1 : 1 + min(rank, 2)])

    kind = sys.argv[3]
    dist.init_process_group(sys.argv[2])
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.ReLU(), torch.nn.Linear(600, 8))
    join, steps = contextlib.nullcontext(), 6
    if kind in ("ddp", "uneven"):
        model = DistributedDataParallel(net, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        if kind == "uneven":
            join, steps = model.join(), 6 - rank
    elif kind == "unused":
        net = Branches()
        model = DistributedDataParallel(net, bucket_cap_mb=0.02, find_unused_parameters=True)
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net[0], mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    with join:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    state = {name: getattr(x, "full_tensor", lambda x=x: x)()
             for name, x in net.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, sys.argv[1])
    dist.destroy_process_group()
    """

FAILS = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from datetime import timedelta
    import paceline

    what, later = sys.argv[1].split(","), "later" in sys.argv
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for one in what:
        group = dist.new_group(backend="paceline", timeout=timedelta(seconds=float(sys.argv[2])))
        x = torch.ones(100_000)
        dist.all_reduce(x, group=group)
        start = time.monotonic()
        try:
            if one == "dies" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if one == "sleeps" and rank == 1:
                time.sleep(3)
            if one == "size" and rank == 1:
                x = torch.ones(70_000)
            if one == "type" and rank == 1:
                x = torch.ones(50_000, dtype=torch.float64)
            if one == "call" and rank == 1:
                dist.broadcast(x, 0, group=group)
            work = dist.all_reduce(x, group=group, async_op=later)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            print(f"{one} after {time.monotonic() - start:.2f} s rank {rank}: {error}", flush=True)
            try:  # and from now on
                dist.all_gather([torch.empty_like(x) for _ in range(dist.get_world_size())], x,
                                group=group)
            except RuntimeError as error:
                print(f"{one} again rank {rank}: {error}", flush=True)
        if one != "dies":
            dist.barrier()
    os._exit(0)
    """
