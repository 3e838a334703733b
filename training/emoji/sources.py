"""Where the images come from: pinned npm packages, one license and one credit line for each image set.

Only licenses without share-alike are in the list. Nothing here downloads or renders; see build_data.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """One npm package, pinned by version and by the sha512 of its tarball."""

    name: str
    version: str
    sha512: str

    @property
    def folder(self) -> str:
        return self.name.lstrip("@").replace("/", "_")

    @property
    def tarball(self) -> str:
        return f"{self.name}/-/{self.name.split('/')[-1]}-{self.version}.tgz"

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class ImageSet:
    """One style of images: the package that holds it, how its files are named, its license and its credit."""

    style: str
    package: Package
    path: str  # folder of files named by code point, or the icons.json of an iconify package
    suffix: str  # ".png", ".webp", ".svg", or ".json" for iconify
    licence: str
    credit: str


NAMES = Package(
    "emojibase-data",
    "17.0.0",
    "Yvgb5AWoHViHV/gq1qr5ZAarcBip+B27/ZLRsUJkbgAEaLlZ/fof9g882LTpmEpyhBNEC0m2SEmItljHsTygjA==",
)
GOOGLE = Package(
    "emoji-datasource-google",
    "16.0.0",
    "ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
)
TWITTER = Package(
    "emoji-datasource-twitter",
    "16.0.0",
    "7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
)
FLUENT_3D = Package(
    "@lobehub/fluent-emoji-3d",
    "1.1.0",
    "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
)
FLUENT_FLAT = Package(
    "@lobehub/fluent-emoji-flat",
    "1.1.0",
    "lPYCg8+N56MIj+iOgeBeH6AF0tneXxJCvgi41rOTjAWpA5rU2WUcmU1fiIXouEe8GrSTarWCYLY2ML+rdLRHsg==",
)
FLUENT_MODERN = Package(
    "@lobehub/fluent-emoji-modern",
    "1.0.0",
    "YdZEgLC/vh29uDEl440q3W2vN50FdUFarQoKUHH9Clzx61/wW6mImLJywVBMKQPa3+GL59j3NvOlTLhH4rxleA==",
)
NOTO_V1 = Package(
    "@iconify-json/noto-v1",
    "1.2.5",
    "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
)
EMOJIONE = Package(
    "@iconify-json/emojione",
    "1.2.3",
    "T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
)
FXEMOJI = Package(
    "@iconify-json/fxemoji",
    "1.2.2",
    "UAasRaxzFUKfIGSmLwnoarsssA4LX0VLLuEmplIqM6ZNQqIQRtav8tZ4H1neTlBreXuMQyAifr5jP4kn78DpiQ==",
)
PACKAGES = (NAMES, GOOGLE, TWITTER, FLUENT_3D, FLUENT_FLAT, FLUENT_MODERN, NOTO_V1, EMOJIONE, FXEMOJI)

NOTO_CREDIT = "Noto Emoji, copyright Google LLC"
FLUENT_CREDIT = "Fluent Emoji, copyright Microsoft Corporation"
TWEMOJI_CREDIT = "Twemoji, copyright Twitter, Inc and other contributors"
EMOJIONE_CREDIT = "EmojiOne 2 (EmojiTwo), copyright Emoji One and contributors"
FXEMOJI_CREDIT = "FxEmojis, copyright Mozilla Foundation"

IMAGE_SETS = (
    ImageSet("noto", GOOGLE, "img/google/64", ".png", "Apache-2.0", NOTO_CREDIT),
    ImageSet("twemoji", TWITTER, "img/twitter/64", ".png", "CC-BY-4.0", TWEMOJI_CREDIT),
    ImageSet("fluent3d", FLUENT_3D, "assets", ".webp", "MIT", FLUENT_CREDIT),
    ImageSet("fluentflat", FLUENT_FLAT, "assets", ".svg", "MIT", FLUENT_CREDIT),
    ImageSet("fluentmodern", FLUENT_MODERN, "assets", ".svg", "MIT", FLUENT_CREDIT),
    ImageSet("notov1", NOTO_V1, "icons.json", ".json", "Apache-2.0", NOTO_CREDIT),
    ImageSet("emojione", EMOJIONE, "icons.json", ".json", "CC-BY-4.0", EMOJIONE_CREDIT),
    ImageSet("fxemoji", FXEMOJI, "icons.json", ".json", "Apache-2.0", FXEMOJI_CREDIT),
)
