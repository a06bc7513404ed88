"""How `violin benchmark` measures a case: paired times, peak memory in processes of their own, and arithmetic added."""

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
from torch.utils.flop_counter import FlopCounterMode

from .benchmark_cases import CASES, SIDES, Case, replace_kind, sides, twins, work

__all__ = ['added', 'measure', 'paired', 'peak_memory', 'spread', 'time_pair']

SECONDS = 12.0  # of timed rounds where --rounds does not say
ROUNDS = (6, 40)  # at least and at most; even, so that both orders occur equally often


def measure(case: Case, rounds: Optional[int] = None, device: str = 'cpu') -> Dict[str, Any]:
    """Measure one case.

    Args:
        case: Of `CASES`, or another.
        rounds: Timed rounds; by default as many as fit `SECONDS`, within `ROUNDS`.
        device: Where it runs.

    Returns:
        ``value``, what the target bounds, and its ``unit`` (``x`` the plain model's, ``maps``, or ``%``); for timed
        cases ``seconds`` of either side and ``ratio``, for memory ``bytes`` of either side and ``ratio``.
    """
    if case.kind == 'added':
        return added(case)
    if case.kind.startswith('memory'):
        return _memory(case, device)
    try:
        seconds = time_pair(sides(case, device), rounds, device)
    finally:
        gc.collect()
        if case.compiled or case.kind == 'backend':
            torch.compiler.reset()
    ratio = paired(*(seconds[side] for side in SIDES))
    return {
        'value': ratio['median'],
        'unit': 'x',
        'ratio': ratio,
        'seconds': {side: spread(values) for side, values in seconds.items()},
    }


def time_pair(
    calls: Dict[str, Callable[[], Any]], rounds: Optional[int] = None, device: str = 'cpu'
) -> Dict[str, List[float]]:
    """Seconds of every side in every round. Sides take turns, and each round turns their order around."""
    estimate = sum(_warm_up(call, device) for call in calls.values())
    if rounds is None:
        rounds = 2 * round(min(max(SECONDS / estimate, ROUNDS[0]), ROUNDS[1]) / 2)
    seconds = {side: [] for side in calls}
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            for side in list(calls)[:: -1 if index % 2 else 1]:
                seconds[side].append(_timed(calls[side], device))
    finally:
        if was_enabled:
            gc.enable()
    return seconds


def _warm_up(call: Callable[[], Any], device: str) -> float:
    """Call twice, or three times if that takes less than a second; how long the last call took."""
    _timed(call, device)  # compiles, and makes the optimiser's state
    last = _timed(call, device)
    return last if last > 0.5 else _timed(call, device)


def _timed(call: Callable[[], Any], device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)


def spread(values: List[float]) -> Dict[str, Any]:
    """Median, quartiles, extremes and the values themselves."""
    quartiles = statistics.quantiles(values, n=4, method='inclusive') if len(values) > 1 else values * 3
    return {
        'median': statistics.median(values),
        'q1': quartiles[0],
        'q3': quartiles[2],
        'min': min(values),
        'max': max(values),
        'rounds': list(values),
    }


def paired(ours: List[float], theirs: List[float]) -> Dict[str, Any]:
    """`spread` of the ratios of what was measured in the same round: what slows both cancels."""
    return spread([a / b for a, b in zip(ours, theirs)])


def _memory(case: Case, device: str) -> Dict[str, Any]:
    peaks = {side: _peak_in_own_process(case, side, device) for side in SIDES}
    result = {'bytes': peaks, 'ratio': paired([peaks['violin']], [peaks['plain']])}
    model = twins(case, ('violin',))['violin']
    length = model.num_prefix_tokens + model.patch_embed.num_patches
    shape = [model.blocks[0].attn.num_heads, length, length]
    result['map_shape'] = shape
    result['maps'] = {side: peak / (4 * shape[0] * length**2) for side, peak in peaks.items()}
    if case.value == 'maps':
        return {'value': result['maps']['violin'], 'unit': 'maps', **result}
    return {'value': result['ratio']['median'], 'unit': 'x', **result}


def _peak_in_own_process(case: Case, side: str, device: str) -> int:
    root = str(Path(__file__).resolve().parents[2])  # a clone need not be installed
    paths = [root, *filter(None, [os.environ.get('PYTHONPATH')])]
    code = 'from violin_timm.evals.benchmark_measure import _answer; _answer()'
    asked = json.dumps([case.name, side, device, torch.get_num_threads()])
    done = subprocess.run(
        [sys.executable, '-c', code, asked],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]
        raise RuntimeError(f'{case.name}, {side}: {last}')
    return json.loads(done.stdout.splitlines()[-1])


def _answer() -> None:
    """What the process does that `_peak_in_own_process` starts."""
    name, side, device, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    print(json.dumps(peak_memory(CASES[name], side, device)))


def peak_memory(case: Case, side: str, device: str = 'cpu') -> int:
    """Bytes that a model's steps need at their peak, beyond what was there once it was built.

    That includes images, activations, gradients and the optimiser's state, and leaves out weights and libraries. To be
    called in a process of its own, since peaks are a process's.
    """
    model = twins(case, (side,), device)[side]
    gc.collect()
    before = _peak(device, reset=True)
    step = work(replace_kind(case, case.kind.replace('memory_', '')), model, device)
    for _ in range(2):  # the second step of a training has the optimiser's state from the start
        step()
    return max(_peak(device) - before, 1)


def _peak(device: str, reset: bool = False) -> int:
    """Peak bytes so far; with `reset`, bytes in use now, where that can be read."""
    if torch.device(device).type == 'cuda':
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        # ru_maxrss starts at the peak of the process that started this one: exec keeps it. VmHWM does not
        status = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())
        return 1024 * int(status['VmRSS' if reset else 'VmHWM'].split()[0])
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == 'darwin' else 1024 * peak


def added(case: Case) -> Dict[str, Any]:
    """Parameters and arithmetic that the masks add to a model, for one image.

    The base is what `torch.utils.flop_counter` counts in the plain model (matrix products and convolutions), a
    multiplication and an addition as one, as in the paper's 55.4 G. What a Violin adds are elementwise operations,
    which it does not count: with H heads, C curves, N patches, L tokens and T = N (N + 1) / 2 pairs, in every layer

    - once for a grid: ``2 H C`` (rates, and weights with alpha), ``3 H C N`` (powers of gamma for all distances:
      product, exponential, weight), and ``H C T`` (their sum over curves for every pair);
    - for every image: ``H L^2`` (scores times mask).

    A mask is kept at inference, so only the second is paid again. Paper, Table 1 (DeiT-B at 384): 0.0015 % and 0.64 %.
    """
    with torch.device('meta'):
        models = {side: twins(case, (side,), 'meta')[side] for side in SIDES}
        image = torch.empty(1, models['plain'].patch_embed.proj.in_channels, *case.image)
    for block in models['plain'].blocks:
        block.attn.fused_attn = False  # the same products, and every torch counts them
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        models['plain'](image)
    base = counter.get_total_flops() // 2
    attention = [block.attn for block in models['violin'].blocks]
    heads, curves = attention[0].decay.beta.shape
    patches = models['violin'].patch_embed.num_patches
    length = models['violin'].num_prefix_tokens + patches
    mask = len(attention) * heads * curves * (2 + 3 * patches + patches * (patches + 1) // 2)
    scores = len(attention) * heads * length**2
    parameters = {side: sum(p.numel() for p in model.parameters()) for side, model in models.items()}
    more = parameters['violin'] - parameters['plain']
    percent = 100 * (mask + scores) / base
    return {
        'value': percent,
        'unit': '%',
        'parameters': {'plain': parameters['plain'], 'added': more, 'percent': 100 * more / parameters['plain']},
        'multiply_adds': {
            'plain': base,
            'mask': mask,
            'scores': scores,
            'percent': percent,
            'percent_mask_kept': 100 * scores / base,
        },
    }
