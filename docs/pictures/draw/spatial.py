"""Draw split.svg and unet.svg of docs/pictures/spatial: parts of samples, and their halos.

Each picture has a light variant and a dark one. Widths of halos are those of 3 x 3 convolutions.
"""

from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "spatial"
THEMES = {
    "light": {"text": "#1f2328", "line": "#57606a", "halo": "#d4a72c", "back": "none"},
    "dark": {"text": "#e6edf3", "line": "#8b949e", "halo": "#d4a72c", "back": "none"},
}
RANKS = ("#4c8eda", "#2da44e", "#bf5af2", "#e5534b")  # fills of parts, translucent
CELL = 16
Colors = dict[str, str]


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str, opacity: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{stroke}" stroke-width="1.2"/>'
    )


def text(x: float, y: float, words: str, colors: Colors, size: int = 13) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colors["text"]}" font-size="{size}" '
        f'font-family="sans-serif" text-anchor="middle">{words}</text>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float, colors: Colors) -> str:
    return (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colors["line"]}" '
        'stroke-width="1.4" marker-end="url(#end)"/>'
    )


def page(width: int, height: int, parts: list[str], colors: Colors, title: str) -> str:
    marker = (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colors["line"]}"/>'
        "</marker></defs>"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    )
    return "\n".join([head, marker, *parts, "</svg>", ""])


def grid(x: float, y: float, columns: int, rows: int, colors: Colors) -> list[str]:
    lines = [(x + i * CELL, y, x + i * CELL, y + rows * CELL) for i in range(columns + 1)]
    lines += [(x, y + i * CELL, x + columns * CELL, y + i * CELL) for i in range(rows + 1)]
    return [
        f'<line x1="{a}" y1="{b}" x2="{c}" y2="{d}" stroke="{colors["line"]}" '
        'stroke-width="0.4" stroke-opacity="0.6"/>'
        for a, b, c, d in lines
    ]


def split(colors: Colors) -> str:
    """A sample of 12 x 10 positions on 2 x 2 ranks, and what rank 0 reads of the others."""
    parts, left, top, columns, rows = [], 24, 40, 12, 10
    parts.append(text(left + columns * CELL / 2, 24, "layout h2 x w2", colors, 14))
    for rank, fill in enumerate(RANKS):
        x, y = left + (rank % 2) * 6 * CELL, top + (rank // 2) * 5 * CELL
        parts.append(box(x, y, 6 * CELL, 5 * CELL, fill, colors["line"], 0.35))
        parts.append(text(x + 3 * CELL, y + 2.5 * CELL + 5, f"rank {rank}", colors))
    parts += grid(left, top, columns, rows, colors)
    x, y = 300, top + 12
    parts.append(text(x + 5 * CELL, 24, "what rank 0 reads for a 3 x 3 convolution", colors, 14))
    parts.append(box(x, y, 6 * CELL, 5 * CELL, RANKS[0], colors["line"], 0.35))
    parts.append(text(x + 3 * CELL, y + 2.5 * CELL + 5, "its own part", colors))
    parts.append(box(x + 6 * CELL, y, CELL, 5 * CELL, RANKS[1], colors["halo"], 0.6))
    parts.append(box(x, y + 5 * CELL, 6 * CELL, CELL, RANKS[2], colors["halo"], 0.6))
    parts.append(box(x + 6 * CELL, y + 5 * CELL, CELL, CELL, RANKS[3], colors["halo"], 0.6))
    parts += grid(x, y, 7, 6, colors)
    words = (
        (x + 11 * CELL, y + 2.5 * CELL, "a column of rank 1"),
        (x + 11 * CELL, y + 5.8 * CELL, "a corner of rank 3,"),
        (x + 11 * CELL, y + 6.8 * CELL, "by way of rank 1"),
        (x + 3 * CELL, y + 7.2 * CELL, "a row of rank 2"),
    )
    parts += [text(a, b, c, colors, 12) for a, b, c in words]
    return page(580, 216, parts, colors, "A sample on four ranks, and the halo of rank 0")


def unet(colors: Colors) -> str:
    """Levels of a U-Net on two ranks: halos are exchanged at each level, skips are not."""
    parts, levels = [], ((150, 0), (90, 1), (54, 2))
    place: dict[tuple[int, int], tuple[float, float]] = {}
    for side in (0, 1):
        for size, level in levels[: 3 - side]:
            center = 100 + level * 105 if side == 0 else 630 - level * 105
            y = 50 + level * 62 + (0 if level < 2 else 8)
            wide = size * 0.55
            half = size * 0.36
            parts.append(box(center - wide / 2, y, wide, half, RANKS[0], colors["line"], 0.35))
            parts.append(
                box(center - wide / 2, y + half, wide, half, RANKS[1], colors["line"], 0.35)
            )
            band = 5 - level
            parts.append(
                box(center - wide / 2, y + half - band, wide, 2 * band, colors["halo"], "none", 0.9)
            )
            place[side, level] = (center, y + half)
    for center in (100, 630):
        parts.append(text(center, 74, "rank 0", colors, 12))
        parts.append(text(center, 142, "rank 1", colors, 12))
    parts.append(text(365, 30, "halos (yellow) travel before each convolution", colors, 13))
    for level in (0, 1):
        (a, y), (b, _) = place[0, level], place[1, level]
        size = levels[level][0] * 0.3
        parts.append(arrow(a + size, y - 22, b - size - 4, y - 22, colors))
        parts.append(text((a + b) / 2, y - 28, "skip connection: nothing travels", colors, 12))
    for level in (0, 1):
        (a, y), (b, to_y) = place[0, level], place[0, level + 1]
        parts.append(arrow(a + levels[level][0] * 0.2, y + 34, b - 26, to_y - 4, colors))
        (a, y), (b, to_y) = place[0 if level == 1 else 1, level + 1], place[1, level]
        parts.append(arrow(a + 26, y - 4, b - levels[level][0] * 0.2, to_y + 34, colors))
    parts.append(text(365, 252, "pooling and transposed convolutions of even parts need no halo",
                      colors, 12))  # fmt: skip
    return page(730, 268, parts, colors, "A U-Net on two ranks")


def main() -> None:
    for theme, colors in THEMES.items():
        for name, draw in (("split", split), ("unet", unet)):
            file = f"{name}.svg" if theme == "light" else f"dark/{name}-dark.svg"
            (PICTURES / file).write_text(draw(colors))


if __name__ == "__main__":
    main()
