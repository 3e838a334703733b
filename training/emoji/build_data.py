"""Rebuild the captioned 64x64 emoji set from pinned npm packages.

    python training/emoji/build_data.py build/emoji

Downloads about 190 MB into build/emoji/npm (each tarball checked against its sha512), renders every emoji on white
at 64x64 and writes images.npz (`images`, uint8 N,64,64,3) and captions.jsonl (row i belongs to image i, with the
license, the credit line and the source file of that image). Needs pillow, numpy and resvg-py; no node, no npm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from sources import GOOGLE, IMAGE_SETS, NAMES, PACKAGES, ImageSet, Package

from holdover.zoo.emoji import STYLES

SIZE = 64
REGISTRY = "https://registry.npmjs.org"
SKIN_TONE = re.compile(r"-(light|medium-light|medium|medium-dark|dark)-skin-tone$")
LEFT_OUT = ("flags", "component", "other")  # flags are a set of their own; the other two are parts of emoji
CONCEPT_SHARE, PAIR_SHARE = 0.03, 0.05  # held out: whole concepts, and single concept/style pairs


@dataclass(frozen=True)
class Emoji:
    """What Unicode (through emojibase) says about one emoji."""

    base: str
    label: str
    tags: tuple[str, ...]
    group: str
    sub: str
    toned: bool = False


@dataclass(frozen=True)
class Rendering:
    """One image of one emoji, not yet rendered."""

    emoji: Emoji
    source: str
    render: Callable[[], Image.Image]


# -- packages --------------------------------------------------------------------------------------------


def fetch(package: Package, folder: Path, registry: str) -> None:
    """Download and unpack one package, unless it exists; refuse a tarball with another checksum."""
    target = folder / package.folder
    if target.is_dir():
        return
    with urllib.request.urlopen(f"{registry}/{package.tarball}") as reply:
        data = reply.read()
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.sha512:
        raise SystemExit(f"{package}: sha512 of the tarball is {found}, expected {package.sha512}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
    print(f"{package}: {len(data) / 1e6:.1f} MB", flush=True)


def read_json(folder: Path, package: Package, path: str) -> Any:
    return json.loads((folder / package.folder / "package" / path).read_text(encoding="utf-8"))


# -- names -----------------------------------------------------------------------------------------------


def normalise(hexcode: str) -> str:
    """'1f1e6_fe0f' -> '1F1E6': upper case, dashes, no variation selector, no leading zeros."""
    parts = hexcode.upper().replace("_", "-").split("-")
    return "-".join(part.lstrip("0").rjust(2, "0") for part in parts if part != "FE0F")


def squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_emoji(folder: Path) -> dict[str, Emoji]:
    """Every Unicode emoji by normalized code points, skin tone variants included (marked as such)."""
    groups = read_json(folder, NAMES, "meta/groups.json")
    table: dict[str, Emoji] = {}
    for entry in read_json(folder, NAMES, "en/data.json"):
        base = normalise(entry["hexcode"])
        group = groups["groups"].get(str(entry.get("group")), "other")
        sub = groups["subgroups"].get(str(entry.get("subgroup")), "other")
        table[base] = Emoji(base, entry["label"], tuple(entry.get("tags", ())), group, sub)
        for skin in entry.get("skins", ()):
            table[normalise(skin["hexcode"])] = replace(table[base], label=skin["label"], toned=True)
    return table


def names_to_codes(folder: Path, table: dict[str, Emoji]) -> dict[str, str]:
    """Squeezed names (Unicode label, datasource names) -> code points, for sets named by words."""
    names = {squeeze(emoji.label): code for code, emoji in table.items() if not emoji.toned}
    for entry in read_json(folder, GOOGLE, "emoji.json"):
        code = normalise(entry["unified"])
        if code in table:
            for name in filter(None, [entry["name"], *entry["short_names"]]):
                names.setdefault(squeeze(name), code)
    return names


# -- images --------------------------------------------------------------------------------------------


def render_svg(text: str) -> Image.Image:
    import resvg_py

    data = resvg_py.svg_to_bytes(svg_string=text, width=2 * SIZE, skip_system_fonts=True)
    return Image.open(io.BytesIO(bytes(data)))


def open_file(path: Path) -> Image.Image:
    return render_svg(path.read_text(encoding="utf-8")) if path.suffix == ".svg" else Image.open(path)


def on_white(image: Image.Image) -> np.ndarray:
    """Any image -> 64x64 RGB on white, aspect kept."""
    image = image.convert("RGBA")
    side = max(image.size)
    square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    ground = Image.new("RGBA", square.size, (255, 255, 255, 255))
    ground.alpha_composite(square)
    flat = ground.convert("RGB")
    return np.asarray(flat if side == SIZE else flat.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def renderings_by_code(folder: Path, image_set: ImageSet, table: dict[str, Emoji]) -> Iterator[Rendering]:
    """Sets whose files are named by code points."""
    seen: set[str] = set()
    for path in sorted((folder / image_set.package.folder / "package" / image_set.path).glob(f"*{image_set.suffix}")):
        code = normalise(path.name.removesuffix(image_set.suffix))
        if code in table and code not in seen:
            seen.add(code)
            yield Rendering(table[code], f"{image_set.path}/{path.name}", partial(open_file, path))


def icon_svg(icon: dict[str, Any], width: int, height: int) -> str:
    box = f"{icon.get('left', 0)} {icon.get('top', 0)} {icon.get('width', width)} {icon.get('height', height)}"
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{box}">{icon["body"]}</svg>'


def renderings_by_name(
    folder: Path, image_set: ImageSet, table: dict[str, Emoji], names: dict[str, str]
) -> Iterator[Rendering]:
    """Iconify sets, whose icons are named by words."""
    icons = read_json(folder, image_set.package, image_set.path)
    size = icons.get("width", 16), icons.get("height", 16)
    for name, icon in icons["icons"].items():
        if icon.get("hidden") or SKIN_TONE.search(name):
            continue
        code = names.get(squeeze(name))
        if code is not None:
            svg = icon_svg(icon, *size)
            yield Rendering(table[code], f"{image_set.path}#{name}", partial(render_svg, svg))


# -- rows ------------------------------------------------------------------------------------------------


def share(*words: str) -> float:
    """A number in [0, 1) that depends on the words alone, so that the split is fixed."""
    return int.from_bytes(hashlib.sha256("|".join(words).encode()).digest()[:8], "big") / 2**64


def split(base: str, style: str) -> str:
    """Held-out concepts, held-out concept/style pairs (the three fluent styles together), or training."""
    if share("concept", base) < CONCEPT_SHARE:
        return "val_concept"
    family = "fluent" if style.startswith("fluent") else style
    return "val_pair" if share("pair", base, family) < PAIR_SHARE else "train"


def row(index: int, rendering: Rendering, image_set: ImageSet) -> dict[str, Any]:
    emoji = rendering.emoji
    return {
        "i": index,
        "style": image_set.style,
        "caption": f"{emoji.label}, {STYLES[image_set.style]}",
        "label": emoji.label,
        "tags": list(emoji.tags),
        "group": emoji.group,
        "sub": emoji.sub,
        "base": emoji.base,
        "licence": image_set.licence,
        "credit": image_set.credit,
        "source": f"{image_set.package}/{rendering.source}",
        "split": split(emoji.base, image_set.style),
    }


def render(rendering: Rendering) -> np.ndarray | None:
    """The image, or None if the file cannot be rendered or is blank."""
    try:
        pixels = on_white(rendering.render())
    except (UnidentifiedImageError, OSError, ValueError):
        return None
    return pixels if pixels.std() >= 4 else None


def build(folder: Path) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Render all sets: no flags, no skin tone variants, no blank images, no two pixel-identical ones."""
    table = read_emoji(folder)
    names = names_to_codes(folder, table)
    images: list[np.ndarray] = []
    rows: list[dict[str, Any]] = []
    seen: set[bytes] = set()
    for image_set in IMAGE_SETS:
        named = image_set.suffix == ".json"
        found = (
            renderings_by_name(folder, image_set, table, names)
            if named
            else renderings_by_code(folder, image_set, table)
        )
        for rendering in found:
            unwanted = rendering.emoji.toned or rendering.emoji.group in LEFT_OUT
            pixels = None if unwanted else render(rendering)
            if pixels is None or pixels.tobytes() in seen:
                continue
            seen.add(pixels.tobytes())
            rows.append(row(len(images), rendering, image_set))
            images.append(pixels)
    return np.stack(images), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--registry", default=REGISTRY)
    options = parser.parse_args()
    packages = options.out / "npm"
    packages.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        fetch(package, packages, options.registry)
    images, rows = build(packages)
    np.savez_compressed(options.out / "images.npz", images=images)
    with (options.out / "captions.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows)
    for key in ("style", "licence", "split"):
        print(dict(Counter(entry[key] for entry in rows)))
    print(f"{len(images)} images, {len({entry['base'] for entry in rows})} concepts")


if __name__ == "__main__":
    main()
