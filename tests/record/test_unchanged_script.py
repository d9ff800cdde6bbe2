"""The recorder's hooks neither raise into a script nor change what it sees."""

import ranks

SCRIPT = """
    import warnings, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step(torch.ones(4, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8))
    print("tracer warnings", [str(w.message) for w in caught if "Tracer" in w.category.__name__])

    step(torch.ones(4, 8))

    class Odd(torch.Tensor):
        calls = 0
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Odd.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
        def forward(self, x):
            return self.weight
    Takes()(torch.ones(3).as_subclass(Odd))
    print("subclass calls", Odd.calls)

    step(torch.ones(4, 8))

    # A module that has lost its parameters since it was trained
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    with torch.no_grad():
        quantized.eval()
        print("quantized", tuple(quantized(torch.ones(4, 8)).shape))
    print("with grad", tuple(quantized(torch.ones(4, 8)).shape))

    # One graph around functions that have a hook
    other = nn.Linear(8, 8)
    other(torch.ones(4, 8)).sum().backward()

    def clip(x):
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        torch.nn.utils.clip_grad_value_(other.parameters(), 1.0)
        other.zero_grad()
        return other(x) * 2

    compiled = torch.compile(clip, fullgraph=True, backend="eager")
    print("compiled", tuple(compiled(torch.ones(4, 8)).shape))

    class Own(Exception):
        pass
    class Raises(nn.Linear):
        def forward(self, x):
            raise Own("mine")
    try:
        Raises(2, 2)(torch.ones(1, 2))
    except Own as error:
        print("own", error, error.__context__)
    print("final loss 0")
"""


def test_hooks_do_not_disturb_quantize_compile_trace_and_subclasses(tmp_path):
    result = ranks.run(
        ranks.write(tmp_path, SCRIPT), ranks=1, launcher=f"paceline --record {tmp_path / 'record'}"
    )
    assert "quantized (4, 8)" in result.stdout
    assert "with grad (4, 8)" in result.stdout
    assert "compiled (4, 8)" in result.stdout
    assert "tracer warnings []" in result.stdout
    assert "subclass calls 0" in result.stdout
    assert "own mine None" in result.stdout
    assert "Paceline's hook" not in result.stderr
