# Owner(s): ["oncall: cpu inductor"]
"""Recurrent layers away from the process that compiled them: exported, packaged, cached."""

import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_cpp_code
from torch.export import Dim
from torch.export.pt2_archive._package import AOTICompiledModel


# Loads a package and runs it on a list of tensors saved by torch.save; the outputs go into
# a file for torch.load.  No Python here.
PROGRAM = r"""
#include <fstream>
#include <iostream>
#include <iterator>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int argc, char** argv) {
  try {
    std::ifstream file(argv[2], std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const c10::IValue loaded = torch::jit::pickle_load(bytes);
    std::vector<at::Tensor> inputs;
    for (const auto& value : loaded.toListRef()) {
      inputs.push_back(value.toTensor());
    }
    torch::inductor::AOTIModelPackageLoader package(argv[1]);
    std::vector<c10::IValue> outputs;
    for (const auto& output : package.run(inputs)) outputs.emplace_back(output);
    const auto out = torch::jit::pickle_save(c10::ivalue::Tuple::create(outputs));
    std::ofstream(argv[3], std::ios::binary).write(out.data(), out.size());
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 2;
  }
}
"""

# The same from Python, in a process that has compiled nothing
SCRIPT = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
try:
    outputs = package(*torch.load(sys.argv[2]))
except RuntimeError as e:
    print(e, file=sys.stderr)
    sys.exit(2)
torch.save(torch.utils._pytree.tree_leaves(outputs), sys.argv[3])
"""

KINDS = {
    "lstm": (nn.LSTM, {"bidirectional": True}),
    "lstm_proj": (nn.LSTM, {"proj_size": 5}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}
INPUT, HIDDEN = 6, 9
SHAPES = ((1, 1), (1, 3), (7, 1), (40, 9))  # T, B; the example's are (5, 3)


class Layers(nn.Module):
    """Layers of several kinds that read the same input, two of them a given state."""

    def __init__(self, kinds=KINDS):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict(
            {
                kind: KINDS[kind][0](INPUT, HIDDEN, batch_first=True, **KINDS[kind][1])
                for kind in kinds
            }
        )

    def forward(self, x, hx, cx):
        states = {"lstm": (hx, cx), "gru": hx}
        return [layer(x, states.get(kind)) for kind, layer in self.layers.items()]


class OtherTypes(Layers):
    """With layers that go to operators of ATen."""

    def __init__(self):
        super().__init__(["lstm", "gru"])
        self.wide = nn.GRU(INPUT, HIDDEN, dtype=torch.float64)
        self.narrow = nn.LSTM(INPUT, HIDDEN, dtype=torch.bfloat16)

    def forward(self, x, hx, cx):
        others = self.wide(x.double()), self.narrow(x.bfloat16())
        return super().forward(x, hx, cx), others


def example(seq_len, batch_size):
    states = (torch.randn(2, batch_size, HIDDEN) for _ in range(2))
    return torch.randn(batch_size, seq_len, INPUT), *states


def export(module, **kwargs):
    seq_len, batch_size = Dim("T", min=1, max=4096), Dim("B", min=1, max=4096)
    return torch.export.export(
        module,
        example(5, 3),
        dynamic_shapes=({0: batch_size, 1: seq_len}, {1: batch_size}, {1: batch_size}),
        **kwargs,
    )


def build_program(folder):
    """Start the compiler; gives the process and the path of the program."""
    source, program = folder / "run.cpp", folder / "run"
    source.write_text(PROGRAM)
    root = pathlib.Path(torch.__file__).parent
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O0", source, "-o", program),
        *("-I", root / "include", "-I", root / "include/torch/csrc/api/include"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-L", root / "lib", f"-Wl,-rpath,{root / 'lib'}", "-Wl,--no-as-needed"),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), program


class DeploymentTestCase(TestCase):
    def assert_close(self, outputs, expected):
        outputs, expected = pytree.tree_leaves(outputs), pytree.tree_leaves(expected)
        self.assertEqual(len(outputs), len(expected))
        for output, reference in zip(outputs, expected):
            self.assertEqual(output, reference, atol=2e-5, rtol=2e-5)


class TestExportRoundTrip(DeploymentTestCase):
    """With gradients on; test_mkldnn_pattern_matcher.py has it without, strict and not."""

    def test_saved_and_decomposed(self):
        module = Layers().eval()
        program = export(module)
        for decompose in (False, True):
            if decompose:
                program = program.run_decompositions()
                targets = [str(node.target) for node in program.graph.nodes]
                self.assertEqual(sum("rnn_layer" in t for t in targets), 7)
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            program = torch.export.load(file)
            loaded = program.module()
            for shape in SHAPES:
                inputs = example(*shape)
                self.assert_close(loaded(*inputs), module(*inputs))


class TestPackage(DeploymentTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        compiler, cls.program = build_program(cls.folder)
        cls.modules = {"frozen": Layers().eval(), "raw": OtherTypes().eval()}
        cls.counters = {}
        with torch.no_grad():
            for name, module in cls.modules.items():
                counters.clear()
                torch._inductor.aoti_compile_and_package(
                    export(module),
                    package_path=str(cls.folder / f"{name}.pt2"),
                    inductor_configs={"freezing": name == "frozen"},
                )
                cls.counters[name] = counters["inductor"].copy()
        errors = compiler.communicate()[1]
        if compiler.returncode:
            raise AssertionError(f"the program does not compile:\n{errors}")

    def run_process(self, package, inputs, python=False, env=None):
        """Run a package in a new process; gives its status, outputs and last words."""
        paths = [
            self.folder / f"{package}.pt2",
            self.folder / "in",
            self.folder / "out",
        ]
        torch.save(list(inputs), paths[1])
        command = [sys.executable, "-c", SCRIPT] if python else [self.program]
        run = subprocess.run(
            [*command, *paths],
            # Without trying by a compilation what the CPU has
            env={**os.environ, "TORCHINDUCTOR_VEC_ISA_OK": "1", **(env or {})},
            capture_output=True,
            text=True,
        )
        outputs = torch.load(paths[2]) if run.returncode == 0 else None
        return run.returncode, outputs, run.stderr

    def test_kernels_and_constants(self):
        layers = self.counters["frozen"]
        self.assertEqual(layers["cpp_templated_kernel_counter"], 5)
        self.assertEqual(layers["rnn_weight_pack_matcher_count"], 7)
        frozen = torch._inductor.aoti_load_package(str(self.folder / "frozen.pt2"))
        # The packed weights of each direction and nothing else
        self.assertEqual(len(frozen.get_constant_fqns()), 7)

    def test_new_process(self):
        for package, module in self.modules.items():
            for shape in SHAPES:
                inputs = example(*shape)
                status, outputs, errors = self.run_process(package, inputs)
                self.assertEqual(status, 0, errors)
                self.assert_close(outputs, module(*inputs))
            status, outputs, errors = self.run_process(package, inputs, python=True)
            self.assertEqual(status, 0, errors)
            self.assert_close(outputs, module(*inputs))

    def test_other_weights(self):
        package = torch._inductor.aoti_load_package(str(self.folder / "raw.pt2"))
        other, inputs = OtherTypes().eval(), example(9, 2)
        for user_managed in (False, True):
            with torch.no_grad():
                for weight in other.parameters():
                    weight.uniform_(-0.5, 0.5)
            constants = {name: w.detach() for name, w in other.state_dict().items()}
            package.load_constants(
                constants, check_full_update=True, user_managed=user_managed
            )
            self.assert_close(package(*inputs), other(*inputs))
        with torch.no_grad():
            # The package reads the user's own tensors now.
            other.layers["gru"].weight_hh_l0.mul_(0.5)
            other.layers["lstm"].weight_ih_l0.mul_(0.5)
        self.assert_close(package(*inputs), other(*inputs))

    def test_wrong_inputs(self):
        package = torch._inductor.aoti_load_package(str(self.folder / "frozen.pt2"))
        x, hx, cx = example(5, 3)
        long, wide = torch.randn(3, 4097, INPUT), torch.randn(3, 5, INPUT + 1)
        for message, inputs in (
            ("too large at 1, expected to be <= 4096, but got: 4097", (long, hx, cx)),
            ("too small at 1", (x[:, :0].contiguous(), hx, cx)),
            (r"input_handles\[0\]: unmatched dim value at 2", (wide, hx, cx)),
            (
                r"input_handles\[1\].*at 1, expected: .* = 3, but got: 2",
                (x, hx[:, :2], cx),
            ),
            (r"input_handles\[2\].*at 0, expected: 2, but got: 1", (x, hx, cx[:1])),
            (r"input_handles\[2\].*number of dimensions", (x, hx, cx[0])),
            (r"input_handles\[0\].*stride", (x.mT.contiguous().mT, hx, cx)),
            (r"input_handles\[0\].*stride", (x.repeat(1, 2, 1)[:, :5], hx, cx)),
            (r"input_handles\[1\].*dtype", (x, hx.double(), cx)),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                package(*inputs)
        # What strides a dimension of one element has does not matter.
        x, hx, cx = example(5, 1)
        expected = self.modules["frozen"](x, hx, cx)
        self.assert_close(package(x.repeat(1, 2, 1)[:, :5], hx, cx), expected)
        status, _, errors = self.run_process("frozen", (x, hx[:1], cx))
        self.assertEqual(status, 2, errors)
        self.assertIn("input_handles[1]: unmatched dim value at 0", errors)

    def test_narrower_cpu(self):
        capability = torch.backends.cpu.get_cpu_capability()
        if capability not in ("AVX2", "AVX512"):
            raise unittest.SkipTest("needs AVX2 or more")
        env = {"ATEN_CPU_CAPABILITY": "avx2" if capability == "AVX512" else "default"}
        for python in (False, True):
            status, _, errors = self.run_process("frozen", example(5, 3), python, env)
            self.assertGreater(status, 0, errors)  # below 0: killed by a signal
            self.assertIn("this model was compiled for a cpu with avx", errors.lower())


class TestCall(TestCase):
    def test_arguments_and_results_of_any_structure(self):
        class Loader:
            """Gives its inputs back."""

            def __init__(self, args, kwargs, outputs):
                self.specs = [
                    pytree.treespec_dumps(pytree.tree_structure(tree))
                    for tree in ((args, kwargs), outputs)
                ]

            def get_call_spec(self):
                return self.specs

            def boxed_run(self, inputs):
                return inputs

        x, h, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
        for args, kwargs, outputs in (
            ((x, h, c), {}, (x, h, c)),
            ((x, (h, c)), {}, (x, (h, c))),
            ((x, h), {}, [x, h]),
            ((x,), {}, x),
            ((x, 1.0), {}, (x,)),
            ((x,), {"h": h, "c": c}, {"x": x, "h": h, "c": c}),
        ):
            model = AOTICompiledModel(Loader(args, kwargs, outputs))
            result = model(*args, **dict(reversed(kwargs.items())))
            self.assertIs(type(result), type(outputs))
            self.assertEqual(
                *(pytree.tree_flatten(tree)[1] for tree in (result, outputs))
            )
            for ours, theirs in zip(*map(pytree.tree_leaves, (result, outputs))):
                self.assertIs(ours, theirs)
        for given in ({}, {"h": h}, {"h": h, "c": c, "b": c}):
            with self.assertRaisesRegex(ValueError, "keyword mismatch"):
                model(x, **given)


class TestCppWrapper(DeploymentTestCase):
    def test_kinds(self):
        module, inputs = Layers().eval(), example(5, 3)
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=True):
            compiled = torch.compile(module, fullgraph=True, dynamic=True)
            outputs, code = run_and_get_cpp_code(compiled, *inputs)
            self.assert_close(outputs, module(*inputs))
            inputs = example(40, 9)
            self.assert_close(compiled(*inputs), module(*inputs))
        self.assertEqual(counters["inductor"]["cpp_templated_kernel_counter"], 5)
        self.assertIn("inductor_entry_impl", code)
        # Nothing goes back to Python.
        self.assertNotIn("custom_op_wrapper", code)


class TestWarmStart(DeploymentTestCase):
    # The weights are others in each process: they must not come from the cache.
    SCRIPT = """
import json, subprocess, sys, torch
from torch import nn
from torch._dynamo.utils import counters

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 16), nn.GRU(16, 8)
        self.narrow = nn.LSTM(8, 8, dtype=torch.bfloat16)
        self.linear = nn.Linear(8, 32)

    def forward(self, x):
        x = self.gru(self.lstm(x)[0])[0]
        return self.linear(x), self.narrow(x.bfloat16())[0].float()

torch.manual_seed(int(sys.argv[1]))
model, x = Model().eval(), torch.randn(5, 3, 8)
torch._inductor.config.freezing = True
commands = []
sys.addaudithook(
    lambda event, args: event == "subprocess.Popen" and commands.append(str(args[1]))
)
with torch.no_grad():
    pairs = zip(torch.compile(model, fullgraph=True)(x), model(x))
    errors = [(a - b).abs().max().item() for a, b in pairs]
print(json.dumps({
    "errors": errors,
    "packed": counters["inductor"]["mkldnn_rnn_weight_pack_matcher_count"]
    + counters["inductor"]["rnn_weight_pack_matcher_count"],
    "compiled": sum(".main.cpp" in c or "kernel.cpp" in c for c in commands),
    **{k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")},
}))
"""

    def test_second_process_finds_the_code(self):
        told = []
        with tempfile.TemporaryDirectory() as folder:
            for seed in "01":
                run = subprocess.run(
                    [sys.executable, "-c", self.SCRIPT, seed],
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
                    capture_output=True,
                    text=True,
                )
                self.assertEqual(run.returncode, 0, run.stderr[-3000:])
                told.append(json.loads(run.stdout))
        for run in told:
            for error, limit in zip(run["errors"], (1e-5, 2e-2)):
                self.assertLess(error, limit)
        first, second = told
        self.assertEqual(first.get("fxgraph_cache_miss"), 1, first)
        self.assertGreater(first["compiled"], 0, first)
        self.assertEqual(second.get("fxgraph_cache_hit"), 1, second)
        self.assertEqual(second["compiled"], 0, second)


if __name__ == "__main__":
    run_tests()
