"""How the serving methods would rank on a TPU, SIMULATED: no TPU is touched, and no time printed here was measured.

    python tools/simulate_serving.py results/h200/serving.json [--context 256] [--out results/simulated-tpu.json]

The confidences and what was accepted are those of the bench's record; the seconds of a round come from a chip's
published rates (jaxspec/evaluation/simulation.py); budgets and their spread are the planner's own code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxspec.evaluation.simulation import CHIPS, Trace, roofline, simulate
from jaxspec.models.config import ModelConfig
from tools.serving_pairs import SHAPES

METHODS = ("none", "static", "scheduled")


def main() -> int:
    """1 where the ordering is not the one that the bench expects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--context", type=int, default=256, help="tokens of a request")
    parser.add_argument("--concurrency", default="1,4,8,16,32,64,128,256,512")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text(encoding="utf-8"))
    traces = [Trace.parse(rounds) for rounds in record["confidences"]["requests"]]
    weights = int(1e6 * float(re.findall(r"([\d.]+) M parameters", record["drafters"]["dspark"])[0]))
    found: dict[str, Any] = {"simulation": "no TPU was used; seconds follow from published peak rates", "chips": {}}
    config, m = ModelConfig.from_hf(SHAPES["smollm2-135m"]), traces[0].confidence.shape[1]
    for name, chip in CHIPS.items():
        plain = roofline(config, chip, context=arguments.context)
        drafted = roofline(config, chip, context=arguments.context, draft_weights=weights, proposals=m)
        found["chips"][name] = [
            ranked(traces, plain, drafted, int(word), arguments.rounds) for word in arguments.concurrency.split(",")
        ]
        for line in found["chips"][name]:
            print(f"SIMULATED {name}: {json.dumps(line)}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(line["holds"] for lines in found["chips"].values() for line in lines))


def ranked(traces: list[Trace], plain: Any, drafted: Any, requests: int, rounds: int) -> dict[str, Any]:
    """Tokens a second by method, and whether scheduled is where it should be."""
    rate = {method: simulate(method, traces, plain, drafted, requests, rounds=rounds) for method in METHODS}
    m = traces[0].confidence.shape[1]
    dear = drafted.step_seconds(requests, requests * (m + 1)) / plain.step_seconds(requests, requests)
    over_best, over_static = rate["scheduled"] / max(rate["none"], rate["static"]), rate["scheduled"] / rate["static"]
    holds = over_best >= 0.97 and (dear < 1.5 or over_static >= 1.05)
    return {
        "concurrency": requests, "tokens_per_second": {name: round(value, 1) for name, value in rate.items()},
        "scheduled_over_best_other": round(over_best, 3), "static_round_over_plain_step": round(float(dear), 3),
        "scheduled_over_static": round(over_static, 3), "holds": bool(holds),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
