"""A stand-in for trtexec: accepts its options, replays recorded logs, writes its files, fails on request.

Copied to a folder on PATH under the name ``trtexec``, beside ``standin.json``, which contains ``version``, ``samples``
(a folder), accepted ``options``, ``fault`` by stage (build, time, layers, run), and
``calls``, a file to which each command line is appended.
Latencies are those of the simulated device, layers those it fuses; outputs are computed by ONNX's reference.
"""

# ruff: noqa: T201, PTH123 - it is a program, and its output is what is tested
import json
import os
import random
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = json.loads((HERE / "standin.json").read_text())
NUMBER = {"10.16": "101601", "11.1": "110100", "8.6": "8601"}[CONFIG["version"]]
REPLAYED = {"10.16": "trt10.16-mnist-onnx-build-and-run.log", "11.1": "trt11.0-mnist-dumpProfile.excerpt.log"}
MAJOR = int(CONFIG["version"].split(".")[0])
NOISE = 0.01


def banner(word):
    print(f"&&&& {word} TensorRT.trtexec [TensorRT v{NUMBER}] [b11] # {' '.join(sys.argv)}")


def fail(lines, code=1):
    for line in lines:
        print(line)
    banner("FAILED")
    sys.exit(code)


def main():
    options = {}
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        options[name] = value
    options["profiles"] = profiles_of(sys.argv[1:])
    with open(CONFIG["calls"], "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    stage = stage_of(options)
    banner("RUNNING")
    if stage == "help":
        print("=== Model Options ===")
        fail([])  # some versions exit with an error after their help
    refuse_unknown(options)
    break_down(CONFIG.get("fault", {}).get(stage, ""))
    {"build": build, "time": run, "layers": run, "run": run}[stage](options, stage)
    banner("PASSED")


def profiles_of(words):
    """The shapes of each --profile, which are the three following arguments as in the real program."""
    places = [place for place, word in enumerate(words) if word.startswith("--profile=")]
    spans = [dict(word.partition("=")[::2] for word in words[place + 1 : place + 4]) for place in places]
    for span in spans:
        if set(span) != {"--minShapes", "--optShapes", "--maxShapes"}:
            fail(["[E] Found invalid or missing shape spec at profile index"])
    count = sum(word.startswith("--optShapes=") for word in words)
    if count > max(len(places), 1):
        fail(["[E] Multiple --minShapes/--optShapes/--maxShapes without --profile are not allowed. "])
    return spans


def stage_of(options):
    if "--help" in options:
        return "help"
    if "--onnx" in options:
        return "build"
    if "--exportOutput" in options:
        return "run"
    return "layers" if "--dumpProfile" in options else "time"


def refuse_unknown(options):
    unknown = [name for name in options if name not in CONFIG["options"] and name != "profiles"]
    if unknown:
        print("=== Model Options ===")
        time_and_level = "[09/08/2026-10:20:40] [E]"
        fail([f"{time_and_level} Unknown option: {name} {options[name]}".rstrip() for name in unknown])


def break_down(fault):
    if not fault:
        return
    if fault == "crash":
        print('trtexec: graph.cpp:1059: void f(): Assertion `0 && "Unsupported type"\' failed.', flush=True)
        os.abort()
    if fault == "hang":
        (HERE / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    if fault == "garbage":
        print("\x00\xff not what anybody expects")
    if fault in ("garbage", "nothing"):
        banner("PASSED")
    if fault in ("garbage", "nothing", "silent"):
        sys.exit(0)
    for line in (Path(CONFIG["samples"]) / "trtexec-messages.jsonl").read_text().splitlines():
        message = json.loads(line)
        if message["class"] == fault:
            fail(message["lines"])
    raise SystemExit(f"unknown fault {fault}")


def build(options, _stage):
    from qdqspec.backends.fake.cost import cost_of
    from qdqspec.graph.model import load_model

    model = load_model(Path(options["--onnx"]))
    cost = cost_of(model, 0, 1.0)
    layers = [layer_entry(layer) for layer in cost.layers]
    timed = [[entry["Name"], layer.milliseconds] for entry, layer in zip(layers, cost.layers, strict=True)]
    plan = {"onnx": options["--onnx"], "profiles": options["profiles"], "layers": timed}
    if "--saveEngine" in options:
        Path(options["--saveEngine"]).write_text(json.dumps(plan))
    if "--exportLayerInfo" in options:
        ends = {"Bindings": list(model.inputs)} if MAJOR < 11 else {"I/O Tensors": []}
        Path(options["--exportLayerInfo"]).write_text(json.dumps({"Layers": layers, **ends}))
    print("[07/07/2026-02:10:54] [I] Created engine with size: 12.5744 MiB")
    if "--skipInference" not in options:
        replay()


def layer_entry(layer):
    kind = "Int8" if layer.integer else "Float"
    dtype = "Int8" if layer.op_type == "QuantizeLinear" else kind
    typed = {"Datatype": dtype, "Format": "Row major"} if MAJOR >= 11 else {"Format/Datatype": dtype}
    made = [{"Name": name, **typed} for name in layer.tensors or ("inner",)]
    return {
        "Name": " + ".join(layer.nodes) or f"{layer.op_type} of {' '.join(layer.tensors)}",
        "LayerType": "Reformat" if layer.boundary else "CaskConvolution",
        "Origin": "QDQ" if layer.boundary else "",
        "Inputs": made,
        "Outputs": made,
        "Weights": {"Type": kind, "Count": 1},
        "TacticName": "xmma_i8i8_i8i32_f32" if layer.integer else "xmma_f32f32_f32",
        "Metadata": "\x1e".join(f"[ONNX Layer: {name}]" for name in layer.nodes),
    }


def run(options, stage):
    plan = json.loads(Path(options["--loadEngine"]).read_text())
    number = int(options.get("--useProfile", 0))
    plan["layers"] = [[name, ms * (1 + number)] for name, ms in plan["layers"]]  # slower at later profiles
    if number and options["--shapes"] != plan["profiles"][number]["--optShapes"]:
        fail([f"[E] Static dimension mismatch while setting input shape {options['--shapes']}"])
    if stage == "run":
        write_outputs(plan["onnx"], options)
    elif stage == "layers":
        rows = [{"name": n, "timeMs": 10 * ms, "averageMs": ms, "medianMs": ms} for n, ms in plan["layers"]]
        Path(options["--exportProfile"]).write_text(json.dumps([{"count": 10}, *rows]))
    draw = random.Random()
    steady = sum(milliseconds for _, milliseconds in plan["layers"])
    count = int(options["--iterations"]) + 2
    times = [steady * (1 + NOISE * abs(draw.gauss(0, 1))) for _ in range(count)]
    if "--exportTimes" in options:
        rows = [{"startEnqMs": i, "computeMs": ms, "latencyMs": 9 * ms} for i, ms in enumerate(times)]
        Path(options["--exportTimes"]).write_text(json.dumps(rows))
    replay()


def replay():
    """Print the recorded log, without lines about the shapes of its model."""
    for line in (Path(CONFIG["samples"]) / REPLAYED[CONFIG["version"]]).read_text().splitlines():
        if line.startswith("&&&&") or "Dynamic dimensions" in line or "Shape missing" in line:
            continue
        print(line)


def write_outputs(onnx_path, options):
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx_path)
    files = dict(word.rsplit(":", 1) for word in options["--loadInputs"].split(","))
    feeds = {}
    for value in onnx.load(onnx_path).graph.input:
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        data = np.frombuffer(Path(files[value.name]).read_bytes(), dtype)
        given = dict(w.rsplit(":", 1) for w in options.get("--shapes", "").split(",") if w).get(value.name)
        shape = [int(d) for d in given.split("x")] if given else [d.dim_value for d in kind.shape.dim]
        feeds[value.name] = data.reshape(shape)
    outputs = zip(evaluator.output_names, evaluator.run(None, feeds), strict=True)
    entries = []
    for name, value in outputs:
        values = [float(f"{x:.6g}") for x in value.ravel()]
        entries.append({"name": name, "dimensions": "x".join(map(str, value.shape)), "values": values})
    Path(options["--exportOutput"]).write_text(json.dumps(entries))


if __name__ == "__main__":
    main()
