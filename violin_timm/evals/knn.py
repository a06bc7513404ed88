"""`violin knn`: how good frozen features are, by the labels of the nearest images.

    violin knn --checkpoint output/dino/RUN/last.pth.tar --gallery-split train --query-split test
    violin knn --model vit_small_patch16_224.dino --pretrained --data-dir imagenet

Beside the features it measures raw pixels on the same gallery, with `--pixels`.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Sequence

import torch
import torch.nn.functional as F

from ..data.datasets import Batches
from ..engine import build, distributed
from ..engine.config import completed
from ..engine.distributed import World
from ..engine.logging import log
from .features import Features, Pixels, extract, inherit, load_backbone, split_batches
from .report import record, show, title

QUERY_BLOCK, GALLERY_BLOCK = 1024, 65536  # similarities at a time: 256 MiB


def nearest_images(
    queries: torch.Tensor, gallery: torch.Tensor, k: int, device: torch.device | str = 'cpu'
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` gallery images of the greatest inner product with each query, in blocks of bounded memory.

    Args:
        queries: `[Q, D]`.
        gallery: `[N, D]`, with N at least k.
        k: How many.
        device: Where the products are computed.

    Returns:
        Similarities and indices, both `[Q, k]`, the nearest first, on the CPU.
    """
    best = torch.full((len(queries), k), -torch.inf)
    index = torch.zeros((len(queries), k), dtype=torch.long)
    for start in range(0, len(gallery), GALLERY_BLOCK):
        block = gallery[start : start + GALLERY_BLOCK].to(device).T
        for first in range(0, len(queries), QUERY_BLOCK):
            rows = slice(first, first + QUERY_BLOCK)
            similarity, found = (queries[rows].to(device) @ block).topk(min(k, block.shape[1]))
            similarity = torch.cat([best[rows], similarity.cpu()], dim=1)
            found = torch.cat([index[rows], found.cpu() + start], dim=1)
            best[rows], kept = similarity.topk(k)
            index[rows] = found.gather(1, kept)
    return best, index


def votes(similarity: torch.Tensor, labels: torch.Tensor, classes: int, temperature: float) -> torch.Tensor:
    """Votes `[Q, classes]` of neighbours: each gives `exp(similarity / T)` to its class, up to a factor for the query.

    Args:
        similarity: `[Q, k]`.
        labels: Of the neighbours, `[Q, k]`.
        classes: Number of classes.
        temperature: T.
    """
    weight = ((similarity - similarity.amax(1, keepdim=True)) / temperature).exp()
    return torch.zeros(len(labels), classes, dtype=weight.dtype).scatter_add_(1, labels, weight)


def knn_accuracy(
    gallery: tuple[torch.Tensor, torch.Tensor],
    queries: tuple[torch.Tensor, torch.Tensor],
    ks: Sequence[int],
    temperature: float = 0.07,
    world: World | None = None,
) -> dict[int, tuple[float, float]]:
    """Weighted k-NN on the unit sphere.

    Args:
        gallery: Features `[N, D]`, of any length, and labels `[N]`.
        queries: The same of the images to classify.
        ks: Numbers of neighbours; of a smaller gallery, all images vote.
        temperature: Of the votes.
        world: Processes that share the queries; each holds all of both.

    Returns:
        For each k top-1 and top-5 accuracy in per cent; with five classes or fewer the latter is 100.
    """
    world = world or World(torch.device('cpu'))
    features, labels = F.normalize(gallery[0], dim=-1), gallery[1]
    mine = slice(world.rank, None, world.size)
    wanted, truth = F.normalize(queries[0][mine], dim=-1), queries[1][mine]
    classes = int(max(labels.max(), queries[1].max())) + 1
    similarity, index = nearest_images(wanted, features, min(max(ks), len(features)), world.device)
    result = {}
    for k in ks:
        counted = votes(similarity[:, :k], labels[index[:, :k]], classes, temperature)
        ranked = counted.topk(min(5, classes)).indices == truth[:, None]
        right = torch.stack([ranked[:, 0].sum(), ranked.sum()]).double().to(world.device)
        if world.distributed:
            torch.distributed.all_reduce(right)
        result[k] = tuple((100 * right / len(queries[1])).tolist())
    return result


def run(args: Namespace) -> dict[str, dict[int, tuple[float, float]]]:
    """`violin knn`: accuracies by `features` and `pixels`.

    Raises:
        ConfigError: A setting that cannot be.
    """
    checkpoint = inherit(args)
    world = distributed.start(args.device)
    try:
        model = load_backbone(args, checkpoint, world)
        config = build.data_config(completed(args), model)
        splits = (args.gallery_split, args.query_split)
        gallery, queries = (split_batches(args, split, config, world) for split in splits)
        kinds = {'features': Features(model)}
        if args.pixels:
            kinds['pixels'] = Pixels(config)
        found = {kind: _measure(args, kind, module, gallery, queries, world) for kind, module in kinds.items()}
        if world.primary:
            show(args)
        return found
    finally:
        distributed.stop(world)


def _measure(
    args: Namespace, kind: str, module: torch.nn.Module, gallery: Batches, queries: Batches, world: World
) -> dict[int, tuple[float, float]]:
    known, asked = extract(module, gallery, world), extract(module, queries, world)
    if max(args.k) > len(known[0]) and world.primary:
        log.warning('k: got %d; the gallery has %d images, and all of them vote', max(args.k), len(known[0]))
    result = knn_accuracy(known, asked, args.k, args.temperature, world)
    if world.primary:
        name = 'raw pixels' if kind == 'pixels' else title(args)
        where = f'{args.gallery_split} -> {args.query_split}'
        for k, (top1, top5) in result.items():
            record(args.results, f'{k}-NN', name, where, top1, top5)
    return result
