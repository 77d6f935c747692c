# Owner(s): ["oncall: cpu inductor"]
"""Random recurrent layers on CPU, compiled, against eager in float64."""

import copy
import time

import torch
import torch._dynamo
from hypothesis import given, HealthCheck, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.test_case import run_tests, TestCase
from torch.utils import _pytree as pytree


torch.set_num_threads(1)  # small layers, for which a second only waits

EXAMPLES = 120
BUDGET_SECONDS = 45
KINDS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"proj_size": 1}),
    (nn.GRU, {}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@st.composite
def layers(draw):
    """A layer, its arguments in float64, and the options of a run."""
    cls, options = draw(st.sampled_from(KINDS))
    options = dict(options)
    small = st.integers(1, 6)
    input_size, hidden_size = draw(small), draw(st.integers(2, 6))
    if "proj_size" in options:
        options["proj_size"] = draw(st.integers(1, hidden_size - 1))
    torch.manual_seed(draw(st.integers(0, 1000)))
    module = cls(
        input_size,
        hidden_size,
        draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        bidirectional=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        **options,
    )
    seq_len, batch = draw(st.integers(1, 9)), draw(st.integers(0, 5))
    unbatched = draw(st.booleans())
    shape = [seq_len, batch, input_size]
    if unbatched:
        del shape[1]
    elif module.batch_first:
        shape[:2] = shape[1::-1]
    x = torch.randn(shape, dtype=torch.float64)
    args = [x]
    if draw(st.booleans()):
        count = module.num_layers * (2 if module.bidirectional else 1)
        sizes = (module.proj_size or hidden_size, hidden_size)
        lead = (count,) if unbatched else (count, batch)
        state = tuple(torch.randn(*lead, s, dtype=torch.float64) for s in sizes)
        args.append(state if cls is nn.LSTM else state[0])
    if draw(st.booleans()):
        # The last dimension is no longer the one of stride 1.
        args = pytree.tree_map(lambda t: t.mT.contiguous().mT, args)
    dtype = draw(
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    )
    grads = draw(st.sampled_from(["none", "parameters", "all"]))
    return module, args, dtype, grads, draw(st.booleans())


def run(module, fn, args, dtype, grads):
    """Outputs and gradients of the layer ``module``, called as ``fn``."""
    args = pytree.tree_map(
        lambda t: t.detach().to(dtype).requires_grad_(grads == "all"), args
    )
    with torch.set_grad_enabled(grads != "none"):
        outputs = pytree.tree_leaves(fn(*args))
    if grads == "none":
        return outputs
    leaves = [*module.parameters(), *pytree.tree_leaves(args)]
    leaves = [t for t in leaves if t.requires_grad]
    loss = sum((i + 1) * t.square().sum() for i, t in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


class TestSweep(TestCase):
    def test_random_layers(self):
        end = time.monotonic() + BUDGET_SECONDS
        done = []

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(layers())
        def check(example):
            if time.monotonic() < end:
                self.check(*example)
                done.append(example)

        check()
        print(f"{len(done)} of {EXAMPLES} layers in the time")
        self.assertGreater(len(done), 0)

    def check(self, double, args, dtype, grads, dynamic):
        torch._dynamo.reset()
        double = double.double()
        module = copy.deepcopy(double).to(dtype)
        # In lower precision a layer is left to eager where gradients are wanted.
        captured = grads == "none" or dtype in (torch.float32, torch.float64)
        backend = aot_autograd(
            fw_compiler=lambda graph, _: graph, decompositions=select_decomp_table()
        )
        fn = torch.compile(
            module, backend=backend, fullgraph=captured, dynamic=dynamic or None
        )
        ours = run(module, fn, args, dtype, grads)
        eager = run(module, module, args, dtype, grads)
        exact = run(double, double, args, torch.float64, grads)
        self.assertEqual(len(ours), len(exact))
        norm = torch.linalg.vector_norm
        for o, a, e in zip(ours, eager, exact):
            self.assertEqual((o.shape, o.dtype), (a.shape, a.dtype))
            resolution = 20 * torch.finfo(dtype).eps * (norm(e) + 1)
            allowed = 1.5 * norm(a.double() - e) + resolution
            self.assertLessEqual(norm(o.double() - e).item(), allowed.item())


if __name__ == "__main__":
    run_tests()
