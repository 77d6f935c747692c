# Owner(s): ["oncall: cpu inductor"]
"""Recurrent layers on CPU under torch.compile: captured, one node a layer, packed."""

import copy
import io
import itertools
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import unittest

import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._decomp import decompositions
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.utils import _pytree as pytree


freezing = torch._inductor.config.patch(freezing=True)

KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM_proj": (nn.LSTM, {"proj_size": 5}),
    "GRU": (nn.GRU, {}),
    "RNN_TANH": (nn.RNN, {}),
    "RNN_RELU": (nn.RNN, {"nonlinearity": "relu"}),
}
all_kinds = parametrize("kind", list(KINDS))


def make(kind, *args, dtype=torch.float32, **kwargs):
    cls, extra = KINDS[kind]
    torch.manual_seed(0)
    return cls(*args, **extra, **kwargs, dtype=dtype).eval()


def make_state(module, batch, dtype=torch.float32):
    """Random initial state; ``batch`` None for an unbatched input."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    shapes = [(layers, s) if batch is None else (layers, batch, s) for s in sizes]
    state = tuple(torch.randn(shape, dtype=dtype) for shape in shapes)
    return state if isinstance(module, nn.LSTM) else state[0]


def decompose(module, x, state):
    """Call the decomposition of the layer's operator as a plain function."""
    flat = list(module._flat_weights)
    args = (
        flat,
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
        module.batch_first,
    )
    functions = {
        "LSTM": decompositions.lstm_impl,
        "GRU": decompositions.gru_impl,
        "RNN_TANH": decompositions.rnn_tanh_input,
        "RNN_RELU": decompositions.rnn_relu_input,
    }
    output, *final = functions[module.mode](x, state, *args)
    return output, (tuple(final) if len(final) > 1 else final[0])


class GraphRecorder:
    """A backend that keeps the graphs that AOTAutograd makes."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, example_inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        def record(graph, _):
            self.graphs.append(graph)
            return graph

        return aot_autograd(fw_compiler=record, decompositions=select_decomp_table())(
            gm, example_inputs
        )

    def targets(self):
        return [
            str(n.target)
            for g in self.graphs
            for n in g.graph.nodes
            if n.op == "call_function"
        ]

    def layers(self):
        return [t for t in self.targets() if "rnn_layer" in t]


class RNNTestCase(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def assert_close_to_double(self, module, actual, args, rtol=1e-5):
        """Compare with eager in float64 by the norm of the difference."""
        module, args = copy.deepcopy((module, args))
        expected = module.double()(
            *pytree.tree_map_only(torch.Tensor, torch.Tensor.double, args)
        )
        self.assert_same_norm(actual, expected, rtol)

    def assert_same_norm(self, actual, expected, rtol=1e-5):
        actual, expected = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
        self.assertEqual(len(actual), len(expected))
        for a, e in zip(actual, expected):
            self.assertEqual(a.shape, e.shape)
            error = torch.linalg.vector_norm(a.double() - e.double())
            self.assertLessEqual(
                error.item(), rtol * torch.linalg.vector_norm(e.double()).item()
            )


class TestCapture(RNNTestCase):
    @all_kinds
    @parametrize("bidirectional", [False, True])
    def test_one_node_per_layer_and_direction(self, kind, bidirectional):
        module = make(kind, 6, 7, 3, bidirectional=bidirectional)
        sizes = []
        for seq_len in (3, 50):
            torch._dynamo.reset()
            recorder = GraphRecorder()
            fn = torch.compile(module, backend=recorder, fullgraph=True)
            x = torch.randn(seq_len, 4, 6)
            with torch.no_grad():
                self.assert_close_to_double(module, fn(x), (x,))
            self.assertEqual(len(recorder.graphs), 1)
            self.assertEqual(len(recorder.layers()), 3 * (1 + bidirectional))
            sizes.append(len(recorder.targets()))
        self.assertEqual(sizes[0], sizes[1])

    @all_kinds
    @parametrize(
        "smallest,oblivious,most", [(2, False, 3), (1, False, 5), (1, True, 3)]
    )
    def test_graph_count(self, kind, smallest, oblivious, most):
        """One static graph and a dynamic one; Dynamo specializes on a size of 1."""
        patch = torch.fx.experimental._config.patch(backed_size_oblivious=oblivious)
        self.enterContext(patch)
        module = make(kind, 6, 7, 2, bidirectional=True)
        backend = CompileCounterWithBackend("aot_eager")
        fn = torch.compile(module, backend=backend, fullgraph=True)
        rng = random.Random(0)
        with torch.no_grad():
            for _ in range(100):
                x = torch.randn(rng.randint(smallest, 40), rng.randint(smallest, 9), 6)
                self.assert_same_norm(fn(x), module(x))
        self.assertLessEqual(backend.frame_count, most)

    def test_backend_sees_rnn(self):
        recorder = GraphRecorder()
        fn = torch.compile(nn.RNN(3, 3, 3).eval(), backend=recorder)
        with torch.no_grad():
            fn(torch.randn(1, 2, 3))
        self.assertEqual(len(recorder.layers()), 3)

    @parametrize("inference_mode", [False, True])
    def test_inference_mode(self, inference_mode):
        module = make("LSTM", 10, 5, batch_first=True)
        fn = torch.compile(module, fullgraph=True)
        x = torch.randn(2, 3, 10)
        guard = torch.inference_mode if inference_mode else torch.no_grad
        with guard():
            self.assert_close_to_double(module, fn(x), (x,))

    @parametrize("grad", [False, True])
    @parametrize("captured", [False, True])
    def test_code_around_a_layer_is_compiled(self, captured, grad):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.before = nn.Linear(12, 12)
                self.lstm = nn.LSTM(12, 8, 2, batch_first=True)
                self.after = nn.Linear(8, 3)

            def forward(self, x):
                x, _ = self.lstm(self.before(x).relu())
                return self.after(x).sigmoid()

        if not captured and not grad:
            return  # in inference there is no break on CPU
        # With gradients a layer in bfloat16 is left to eager.
        dtype = torch.float32 if captured else torch.bfloat16
        module = Model().eval().to(dtype)
        backend = CompileCounterWithBackend("aot_eager")
        fn = torch.compile(module, backend=backend)
        x = torch.randn(4, 5, 12, dtype=dtype)
        with torch.set_grad_enabled(grad):
            self.assertEqual(fn(x), module(x))
        seen = [
            str(n.target)
            for g in backend.graphs
            for n in g.graph.nodes
            if n.op != "output"
        ]
        self.assertEqual(len(backend.graphs), 1 if captured else 2)
        self.assertEqual(sum("linear" in t for t in seen), 2)
        self.assertEqual(sum("sigmoid" in t for t in seen), 1)
        self.assertEqual(sum("lstm" in t and "l_self" not in t for t in seen), captured)

    def test_layer_compiled_alone_breaks_with_gradients(self):
        """In bfloat16, which is captured in inference only."""
        backend = CompileCounterWithBackend("aot_eager")
        module = nn.GRU(4, 5, dtype=torch.bfloat16)
        x = torch.randn(3, 2, 4, dtype=torch.bfloat16)
        self.assertEqual(torch.compile(module, backend=backend)(x), module(x))
        self.assertEqual(backend.frame_count, 0)

    def test_subclass_calling_super(self):
        class Gated(nn.GRU):
            def forward(self, x):
                return super().forward(x * 2)[0].sigmoid()

        module = Gated(4, 5).eval().bfloat16()
        x = torch.randn(3, 2, 4, dtype=torch.bfloat16)
        with torch.no_grad():
            backend = CompileCounterWithBackend("aot_eager")
            fn = torch.compile(module, backend=backend, fullgraph=True)
            self.assertEqual(fn(x), module(x))
            self.assertEqual(backend.frame_count, 1)
        torch._dynamo.reset()
        # With gradients the subclass is left to eager as stock leaves it.
        self.assertEqual(torch.compile(module, backend="aot_eager")(x), module(x))

    def test_other_device_is_not_captured(self):
        module = nn.LSTM(4, 5, device="meta").eval()
        with (
            torch.no_grad(),
            self.assertRaisesRegex(
                torch._dynamo.exc.Unsupported, "does not support RNN"
            ),
        ):
            torch.compile(module, backend="aot_eager", fullgraph=True)(
                torch.randn(3, 2, 4, device="meta")
            )

    @torch._dynamo.config.patch(allow_rnn=True)
    def test_allow_rnn_overrides(self):
        module = nn.GRU(4, 5, dtype=torch.bfloat16)
        backend = CompileCounterWithBackend("aot_eager")
        x = torch.randn(3, 2, 4, dtype=torch.bfloat16)
        fn = torch.compile(module, backend=backend, fullgraph=True)
        self.assertEqual(fn(x), module(x), atol=1e-2, rtol=1e-2)
        self.assertEqual(backend.frame_count, 1)

    @all_kinds
    def test_packed_sequence(self, kind):
        module = make(kind, 6, 7, batch_first=True)
        packed = pack_padded_sequence(
            torch.randn(3, 9, 6), [9, 4, 6], batch_first=True, enforce_sorted=False
        )
        fn = torch.compile(module, backend="aot_eager")
        with torch.no_grad():
            self.assertEqual(fn(packed), module(packed))


class TestNumerics(RNNTestCase):
    @all_kinds
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_grid(self, kind, dtype):
        """The grid of the upstream pull request's tests, through the decomposition.

        bfloat16 is the type of the module here; autocast has a test of its own."""
        axes = itertools.product(*([(False, True)] * 5), (1, 7), (1, 7), (1, 7), (1, 7))
        for unbatched, bi, bias, with_state, batch_first, size, layers, b, t in axes:
            if unbatched and (b == 7 or batch_first):
                continue
            module = make(
                kind,
                size,
                7,
                layers,
                bias=bias,
                batch_first=batch_first,
                bidirectional=bi,
                dtype=dtype,
            )
            x = torch.randn(*((b, t) if batch_first else (t, b)), size, dtype=dtype)
            state = make_state(module, b, dtype)
            if not with_state:
                state = pytree.tree_map(torch.zeros_like, state)
            with torch.no_grad():
                actual = decompose(module, x, state)
                self.assertEqual(actual, module(x, state))
                if dtype == torch.float32:
                    self.assert_close_to_double(module, actual, (x, state))

    @freezing
    @parametrize(
        "unbatched,size,layers,bidirectional,bias,with_state,batch_first,batch,seq_len",
        [
            # Each pair of two axes' values occurs in at least one row.
            (True, 1, 1, False, True, True, False, 1, 7),
            (True, 7, 7, True, False, False, True, 1, 1),
            (False, 1, 7, False, False, True, True, 7, 1),
            (False, 7, 1, True, True, False, False, 7, 7),
            (False, 7, 7, False, True, True, True, 1, 7),
            (False, 1, 1, True, False, False, False, 1, 1),
        ],
    )
    def test_lstm_grid_inductor(
        self,
        unbatched,
        size,
        layers,
        bidirectional,
        bias,
        with_state,
        batch_first,
        batch,
        seq_len,
    ):
        module = make(
            "LSTM",
            size,
            7,
            layers,
            bias=bias,
            batch_first=batch_first,
            bidirectional=bidirectional,
        )
        shape = (batch, seq_len) if batch_first else (seq_len, batch)
        x = torch.randn(*((seq_len,) if unbatched else shape), size)
        args = (x,)
        if with_state:
            args += (make_state(module, None if unbatched else batch),)
        fn = torch.compile(module, fullgraph=True)
        with torch.no_grad():
            self.assert_close_to_double(module, fn(*args), args)
        self.assertEqual(
            counters["inductor"]["rnn_weight_pack_matcher_count"],
            layers * (1 + bidirectional),
        )

    @all_kinds
    @parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtype(self, kind, dtype):
        module = make(kind, 6, 7, 2, bidirectional=True, dtype=dtype)
        recorder = GraphRecorder()
        fn = torch.compile(module, backend=recorder, fullgraph=True)
        x = torch.randn(7, 3, 6, dtype=dtype)
        with torch.no_grad():
            actual, eager = fn(x), module(x)
        self.assertEqual(len(recorder.layers()), 4)
        for a, e in zip(pytree.tree_leaves(actual), pytree.tree_leaves(eager)):
            self.assertEqual(a.dtype, e.dtype)
        double = copy.deepcopy(module).double()
        expected = double(x.double())
        for a, e, r in zip(*map(pytree.tree_leaves, (actual, eager, expected))):
            norm = torch.linalg.vector_norm
            allowed = 1.5 * norm(e.double() - r).item() + 1e-14
            self.assertLessEqual(norm(a.double() - r).item(), allowed)

    @all_kinds
    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, kind, dtype):
        module = make(kind, 6, 7, 2, bidirectional=True)
        recorder = GraphRecorder()
        fn = torch.compile(module, backend=recorder, fullgraph=True)
        x = torch.randn(7, 3, 6)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            actual = fn(x)
            try:
                eager = module(x)
            except RuntimeError as e:
                # Eager's LSTM goes to oneDNN although this CPU lacks the type.
                self.assertIn("LSTM forward propagation primitive", str(e))
                self.assertEqual(kind, "LSTM")
                eager = None
        self.assertEqual(len(recorder.layers()), 4)
        if eager is None:
            self.assertEqual({t.dtype for t in pytree.tree_leaves(actual)}, {dtype})
            self.assert_close_to_double(module, actual, (x,), rtol=2e-2)
        else:
            self.assertEqual(actual, eager)

    @parametrize("isa", ["AVX2", "DEFAULT"])
    def test_weak_isa(self, isa):
        """bf16 on a CPU whose oneDNN has no bf16 ends in another kernel."""
        code = """
import torch
assert torch.backends.cpu.get_cpu_capability() == ISA, torch.backends.cpu.get_cpu_capability()
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    m = torch.nn.LSTM(8, 9, dtype=dtype).eval()
    x = torch.randn(7, 3, 8, dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(m, backend="aot_eager", fullgraph=True)(x), m(x))
"""
        code = code.replace("ISA", repr(isa))
        self.run_in_subprocess(
            code, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY=isa.lower()
        )

    def run_in_subprocess(self, code, **env):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
        )
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])

    def test_empty_batch(self):
        code = """
import torch
for cls in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
    m = cls(8, 9, 2, bidirectional=True).eval()
    x = torch.randn(5, 0, 8)
    with torch.no_grad():
        expected = m(x)
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            with torch._inductor.config.patch(freezing=True):
                actual = torch.compile(m, backend=backend, fullgraph=True)(x)
            torch.testing.assert_close(actual, expected)
"""
        self.run_in_subprocess(code)

    def test_batch_becomes_empty(self):
        module = make("LSTM", 6, 7)
        fn = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.no_grad():
            for batch in (3, 5, 0, 1):
                x = torch.randn(4, batch, 6)
                self.assertEqual(fn(x), module(x))

    @all_kinds
    def test_noncontiguous(self, kind):
        module = make(kind, 6, 7, 2, bidirectional=True)
        x = torch.randn(6, 4, 5).permute(2, 1, 0)
        state = pytree.tree_map(
            lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
            make_state(module, 4),
        )
        fn = torch.compile(module, fullgraph=True)
        with torch.no_grad():
            self.assert_close_to_double(module, fn(x, state), (x, state))

    def test_no_weight_sized_dummy_bias(self):
        module = make("LSTM", 6, 7, bias=False)
        recorder = GraphRecorder()
        fn = torch.compile(module, backend=recorder, fullgraph=True)
        x = torch.randn(5, 3, 6)
        with torch.no_grad():
            self.assertEqual(fn(x), module(x))
        (graph,) = recorder.graphs
        (layer,) = (n for n in graph.graph.nodes if "rnn_layer" in str(n.target))
        for bias in layer.args[3:5]:
            self.assertEqual(bias.meta["val"].shape, (28,))

    def test_bad_input(self):
        module = make("LSTM", 16, 32)
        x = torch.randn(4, 3, 16)
        h, c = torch.zeros(1, 3, 32), torch.zeros(1, 3, 32)
        packed = pack_padded_sequence(x, [4, 3, 2])
        cases = {
            "batch": (x, (h[:, :2], c[:, :2])),
            "hidden size": (x, (h[..., :31], c)),
            "cell size": (x, (h, c[..., :31])),
            "state rank": (x, (h[0], c[0])),
            "state dtype": (x, (h.double(), c.double())),
            "width": (x[..., :15],),
            "rank": (x[None],),
            "dtype": (x.double(),),
            "no time step": (x[:0],),
            "packed batch": (packed, (h[:, :2], c[:, :2])),
        }
        for name, args in cases.items():
            with self.subTest(name), torch.no_grad():
                torch._dynamo.reset()
                with self.assertRaises((RuntimeError, ValueError)) as eager:
                    module(*args)
                fn = torch.compile(module, backend="aot_eager")
                with self.assertRaises(type(eager.exception)) as compiled:
                    fn(*args)
                self.assertIs(type(compiled.exception), type(eager.exception))
                self.assertEqual(str(compiled.exception), str(eager.exception))


class TestGradients(RNNTestCase):
    @all_kinds
    @parametrize("reverse", [False, True])
    def test_gradcheck(self, kind, reverse):
        module = make(kind, 2, 7, dtype=torch.float64)
        state = make_state(module, 2, torch.float64)
        states = [s[0].requires_grad_() for s in pytree.tree_leaves(state)]
        x = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)

        def fn(x, *tensors):
            h, c, *weights = (
                tensors if len(states) == 2 else (tensors[0], None, *tensors[1:])
            )
            output = torch.ops.torch_rnn.rnn_layer(
                x, weights, h, c, module.mode, True, reverse
            )
            return output[: 1 + len(states)]

        self.assertTrue(
            torch.autograd.gradcheck(fn, (x, *states, *module._flat_weights))
        )

    @all_kinds
    @parametrize("grad", [False, True])
    def test_dropout_between_layers(self, kind, grad):
        """With p=0.5 each element of a layer's input is 0 or twice itself."""
        module = make(kind, 6, 400, 3, dropout=0.5).train()
        state = pytree.tree_map(torch.zeros_like, make_state(module, 2))
        x = torch.randn(3, 2, 6)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            first = decompose(module, x, state)[0]
            second = decompose(module, x, state)[0]
            torch.manual_seed(1)
            self.assertEqual(decompose(module, x, state)[0], first)
            without = decompose(module.eval(), x, state)[0]
            self.assertEqual(decompose(module, x, state)[0], without)
        self.assertNotEqual(first, second)
        self.assertNotEqual(first, without)

    @parametrize("probability", [0.25, 1.0])
    def test_dropout_rate(self, probability):
        """A layer that passes its input on (RNN relu, identity weights) shows the mask."""
        module = nn.RNN(500, 500, 2, nonlinearity="relu", dropout=probability)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.zero_()
                if name.startswith("weight_ih"):
                    p.copy_(torch.eye(500))
            x = torch.ones(1, 40, 500)
            output = torch.compile(module, backend="aot_eager", fullgraph=True)(x)[0]
        dropped = (output == 0).double().mean().item()
        self.assertEqual(dropped, probability, atol=0.02, rtol=0)
        if probability < 1:
            kept = output[output != 0]
            self.assertEqual(kept, torch.full_like(kept, 1 / (1 - probability)))


class TestWeightPack(RNNTestCase):
    """oneDNN's packing, which stands where the C++ template does not serve."""

    def setUp(self):
        super().setUp()
        patch = torch._inductor.config.patch({"cpp.rnn_template": False})
        self.enterContext(patch)

    @freezing
    def test_packed_at_compile_time(self):
        module = make("LSTM", 6, 7, 2, bidirectional=True)
        x = torch.randn(5, 3, 6)
        fn = torch.compile(module, fullgraph=True)
        with torch.no_grad():
            actual, (code,) = run_and_get_code(fn, x)
            self.assert_close_to_double(module, actual, (x,))
        self.assertEqual(
            counters["inductor"]["mkldnn_rnn_weight_pack_matcher_count"], 4
        )
        self.assertEqual(code.count("mkldnn_rnn_layer.default("), 4)
        self.assertNotIn("_reorder_mkldnn_rnn_layer_weight", code)

    def test_not_packed_without_freezing(self):
        module = make("LSTM", 6, 7)
        x = torch.randn(5, 3, 6)
        fn = torch.compile(module, fullgraph=True)
        with torch.no_grad():
            self.assert_close_to_double(module, fn(x), (x,))
        self.assertEqual(
            counters["inductor"]["mkldnn_rnn_weight_pack_matcher_count"], 0
        )

    def test_no_reorder_at_run_time(self):
        """oneDNN's log of steady-state calls has the layers and no weight reorder."""
        code = """
import torch
m = torch.nn.LSTM(24, 32, 1, bidirectional=True).eval()
patch = {"freezing": True, "cpp.rnn_template": False}
with torch.no_grad(), torch._inductor.config.patch(patch):
    f = torch.compile(m, fullgraph=True)
    shapes = [(11, 7), (9, 4), (3, 2), (30, 33), (5, 1), (1, 1), (12, 1)]
    inputs = [torch.randn(t, b, 24) for t, b in shapes]
    for x in inputs:
        f(x)
    for x in inputs:
        print("CALL", tuple(x.shape), flush=True)
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            f(x)
"""
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        self.assertEqual(result.returncode, 0, result.stderr[-2000:])
        calls = result.stdout.split("CALL")[1:]
        self.assertEqual(len(calls), 7)
        for call in calls:
            self.assertEqual(call.count("exec,cpu,rnn"), 2, call)
            self.assertNotIn(",reorder,", call)

    @freezing
    @parametrize("change_batch", [False, True])
    def test_changed_lengths(self, change_batch):
        module = make("LSTM", 2, 5, 3, bidirectional=True)
        fn = torch.compile(module, fullgraph=True)
        with torch.no_grad():
            for i, seq_len in enumerate((3, 4, 6, 9, 2)):
                batch = 2 + i if change_batch else 2
                args = torch.randn(seq_len, batch, 2), make_state(module, batch)
                self.assert_close_to_double(module, fn(*args), args)
        graphs = counters["stats"]["unique_graphs"]
        self.assertLessEqual(graphs, 3)
        self.assertEqual(
            counters["inductor"]["mkldnn_rnn_weight_pack_matcher_count"], 6 * graphs
        )


class TestTensorList(RNNTestCase):
    """Inductor nodes whose inputs hold a list of tensors."""

    def compile_and_check(self, fn, *args):
        with torch.no_grad():
            actual, (code,) = run_and_get_code(torch.compile(fn, fullgraph=True), *args)
            self.assertEqual(actual, fn(*args))
        return code

    def layer(self, x, weights, h):
        return torch.ops.torch_rnn.rnn_layer(x, weights, h, None, "GRU", True, False)[0]

    def inputs(self):
        torch.manual_seed(0)
        weights = [torch.randn(s) for s in ((21, 6), (21, 7), (21,), (21,))]
        return torch.randn(5, 3, 6), weights, torch.randn(3, 7)

    def test_elements_are_realized(self):
        """An element that is computed in the graph becomes a buffer before the call."""

        def fn(x, weights, h):
            return self.layer(x, [w.sin() * 2 for w in weights], h) + 1

        self.compile_and_check(fn, *self.inputs())

    def test_elements_may_be_views(self):
        def fn(x, weights, h):
            w_ih, w_hh, b_ih, b_hh = weights
            w = [w_ih.t().contiguous().t(), w_hh.flip(0)[:21], b_ih[:21], b_hh * 1]
            return self.layer(x.transpose(0, 1).contiguous().transpose(0, 1), w, h)

        self.compile_and_check(fn, *self.inputs())

    def test_one_tensor_in_two_places(self):
        def fn(x, weights, h):
            b = weights[2] + 1
            return self.layer(x, [weights[0], weights[1], b, b], h) + b.sum()

        self.compile_and_check(fn, *self.inputs())

    def test_elements_outlive_their_other_uses(self):
        """The scheduler sees a read of each element, so no buffer is reused early."""

        def fn(x, weights, h):
            scaled = [w * 3 for w in weights]
            total = scaled[0].sum() + scaled[2].sum()
            x = x + torch.cat([total.reshape(1)] * 6)
            return self.layer(x, scaled, h) - total

        self.compile_and_check(fn, *self.inputs())

    @torch._inductor.config.patch(cpp_wrapper=True)
    def test_cpp_wrapper(self):
        def fn(x, weights, h):
            return self.layer(x, [w * 2 for w in weights], h)

        self.compile_and_check(fn, *self.inputs())

    def test_reads_and_unwrapping_of_lists(self):
        from torch._inductor import ir

        class Node(ir.InputsKernel):
            pass

        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        graph = GraphLowering(torch.fx.symbolic_trace(lambda a: a))
        with V.set_graph_handler(graph):
            layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [2], [1])
            boxes = [
                ir.TensorBox.create(ir.InputBuffer(name=n, layout=layout))
                for n in ("a", "b", "c")
            ]
            inputs = ir.InputsKernel.unwrap_storage([boxes[0], boxes[1:]])
            self.assertEqual(inputs[0].get_name(), "a")
            self.assertEqual([i.get_name() for i in inputs[1]], ["b", "c"])
            node = Node(name="buf0", layout=layout, inputs=inputs)
            self.assertEqual(
                {d.name for d in node.get_read_writes().reads}, {"a", "b", "c"}
            )


class TestLayerOp(RNNTestCase):
    @all_kinds
    @parametrize("reverse", [False, True])
    def test_opcheck(self, kind, reverse):
        module = make(kind, 6, 7)
        h, c = (
            make_state(module, 3) if "LSTM" in kind else (make_state(module, 3), None)
        )
        args = (
            torch.randn(5, 3, 6),
            [w.detach() for w in module._flat_weights],
            h[0],
            None if c is None else c[0],
            module.mode,
            True,
            reverse,
        )
        torch.library.opcheck(torch.ops.torch_rnn.rnn_layer.default, args)
        with torch.no_grad():
            output, hy, cy = torch.ops.torch_rnn.rnn_layer(*args)
            flip = (lambda t: t.flip(0)) if reverse else (lambda t: t)
            expected, state = module(flip(args[0]), h if c is None else (h, c))
        self.assertEqual(output, flip(expected))
        self.assertEqual(hy, (state if c is None else state[0])[0])
        if c is not None:
            self.assertEqual(cy, state[1][0])

    def test_inconsistent_sizes(self):
        weights = [torch.randn(s) for s in ((28, 6), (28, 7), (28,), (28,))]
        good = {
            "input": torch.randn(5, 3, 6),
            "weights": weights,
            "hx": torch.zeros(3, 7),
            "cx": torch.zeros(3, 7),
            "mode": "LSTM",
            "has_biases": True,
            "reverse": False,
        }
        torch.ops.torch_rnn.rnn_layer(**good)
        for message, change in (
            ("input must be", {"input": torch.randn(5, 6)}),
            (r"weights\[0\] must be", {"input": torch.randn(5, 3, 5)}),
            ("hx must be", {"hx": torch.zeros(1, 3, 7)}),
            ("hx has batch 2", {"hx": torch.zeros(2, 7)}),
            ("cx has batch 4", {"cx": torch.zeros(4, 7)}),
            ("cx must be given", {"cx": None}),
            ("cx must be given", {"mode": "GRU"}),
            (r"weights\[0\] must be", {"mode": "GRU", "cx": None}),
            ("mode must be", {"mode": "lstm"}),
            ("weights must hold 4", {"weights": weights[:3]}),
            ("weights must hold 2", {"has_biases": False}),
            (r"weights\[3\] must be", {"weights": [*weights[:3], torch.zeros(27)]}),
            ("larger than 0", {"input": torch.randn(0, 3, 6)}),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                torch.ops.torch_rnn.rnn_layer(**{**good, **change})


class TestExport(RNNTestCase):
    def dynamic_shapes(self):
        dim = torch.export.Dim
        return ({0: dim("T", min=1, max=4096), 1: dim("B", min=1, max=4096)},)

    @all_kinds
    @parametrize("strict", [False, True])
    def test_dynamic_length_and_batch(self, kind, strict):
        module = make(kind, 6, 7, 2, bidirectional=True)
        with torch.no_grad():
            program = torch.export.export(
                module,
                (torch.randn(5, 3, 6),),
                dynamic_shapes=self.dynamic_shapes(),
                strict=strict,
            ).run_decompositions()
            layers = [n for n in program.graph.nodes if "rnn_layer" in str(n.target)]
            self.assertEqual(len(layers), 4)
            for shape in ((2, 1, 6), (57, 4, 6), (300, 2, 6)):
                x = torch.randn(shape)
                self.assertEqual(program.module()(x), module(x))

    @parametrize("kind", ["LSTM", "GRU"])
    def test_aot_inductor(self, kind):
        module = make(kind, 6, 7)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            program = torch.export.export(
                module, (torch.randn(5, 3, 6),), dynamic_shapes=self.dynamic_shapes()
            )
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=os.path.join(folder, "layer.pt2")
            )
            loaded = torch._inductor.aoti_load_package(path)
            for shape in ((2, 1, 6), (57, 4, 6)):
                x = torch.randn(shape)
                self.assert_close_to_double(module, loaded(x), (x,))


class TestModuleState(RNNTestCase):
    def assert_plain(self, module):
        for name, w in zip(module._flat_weights_names, module._flat_weights):
            self.assertIs(w, getattr(module, name))
            self.assertIs(type(w), nn.Parameter)
            self.assertNotIsInstance(w.data, (FakeTensor, FunctionalTensor))
            self.assertFalse(torch._is_functional_tensor(w))

    def assert_copies_work(self, module, x):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        copies = (
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            torch.load(buffer, weights_only=False),
        )
        for other in copies:
            self.assert_plain(other)
            with torch.no_grad():
                self.assertEqual(other(x), module(x))

    @all_kinds
    def test_copies_after_recompile(self, kind):
        module = make(kind, 6, 7, 2)
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            for shape in ((5, 3, 6), (4, 2, 6), (7, 3, 6)):
                x = torch.randn(shape)
                fn(x)
        self.assertGreater(counters["stats"]["unique_graphs"], 1)
        self.assert_plain(module)
        self.assert_copies_work(module, x)

    @all_kinds
    def test_flat_weights_are_not_guarded(self, kind):
        module = make(kind, 6, 7, 2)

        def fn(x):
            return module(x)

        with torch.no_grad():
            torch.compile(fn, backend="eager", fullgraph=True)(torch.randn(4, 3, 6))
        (entry,) = _debug_get_cache_entry_list(fn.__code__)
        guards = str(entry.guard_manager)
        self.assertIn("weight_ih_l1", guards)
        self.assertNotIn("_flat_weight", guards)

    def test_functional_call(self):
        module = make("LSTM", 6, 7)
        new = {k: torch.randn_like(p) for k, p in module.named_parameters()}
        x = torch.randn(4, 3, 6)

        def fn(weights, x):
            return torch.func.functional_call(module, weights, (x,))

        with torch.no_grad():
            actual = torch.compile(fn, backend="aot_eager", fullgraph=True)(new, x)
            self.assert_plain(module)
            self.assertEqual(actual, fn(new, x))
            self.assertNotEqual(actual[0], module(x)[0])
            self.assert_copies_work(module, x)
        self.assert_plain(module)

    @parametrize("in_place", [False, True])
    def test_replaced_parameters_are_used(self, in_place):
        module = make("LSTM", 6, 7)
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 6)
        with torch.no_grad():
            before = fn(x)
            for name, p in list(module.named_parameters()):
                if in_place:
                    p.mul_(2)
                else:
                    setattr(module, name, nn.Parameter(torch.randn_like(p)))
            self.assertEqual(fn(x), module(x))
            self.assertNotEqual(fn(x)[0], before[0])
            self.assert_plain(module)
            self.assert_copies_work(module, x)

    def test_threads(self):
        module = make("LSTM", 6, 7)
        fn = torch.compile(module, fullgraph=True)
        x = torch.randn(9, 3, 6)
        with torch.no_grad():
            expected = module(x)
            fn(x)
        wrong = []

        def work():
            with torch.no_grad():
                for _ in range(200):
                    if not torch.allclose(fn(x)[0], expected[0], atol=1e-6):
                        wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    @unittest.skipUnless(sys.platform == "linux", "reads /proc")
    def test_memory_levels_off(self):
        module = make("LSTM", 16, 32)
        fn = torch.compile(module, fullgraph=True)
        rng = random.Random(0)

        def resident():
            with open("/proc/self/statm") as f:
                return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        def call(n):
            with torch.no_grad():
                for _ in range(n):
                    fn(torch.randn(rng.randint(1, 500), rng.randint(1, 7), 16))

        call(1000)
        before = resident()
        call(1000)
        self.assertLess(resident() - before, 32 << 20)


instantiate_parametrized_tests(TestCapture)
instantiate_parametrized_tests(TestNumerics)
instantiate_parametrized_tests(TestGradients)
instantiate_parametrized_tests(TestWeightPack)
instantiate_parametrized_tests(TestLayerOp)
instantiate_parametrized_tests(TestModuleState)
instantiate_parametrized_tests(TestExport)

if __name__ == "__main__":
    run_tests()
