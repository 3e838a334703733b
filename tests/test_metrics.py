"""Metrics agree with scikit-image, value by value, and refuse what is not a float image."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from holdover.errors import ConfigError
from holdover.metrics import (
    METRICS,
    PSNR_CAP,
    Summary,
    as_images,
    each,
    get_images,
    latents_as_images,
    lpips,
    nonwhite_error,
    psnr,
    ssim,
)

SHAPES = [(3, 64, 64), (1, 33, 47), (3, 11, 11), (3, 12, 101), (1, 128, 16)]


def pair(shape: tuple[int, ...], noise: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    a = torch.rand(shape, generator=source, dtype=torch.float64)
    return a, (a + noise * torch.randn(shape, generator=source, dtype=torch.float64)).clamp(0, 1)


class TestAgainstScikitImage:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("noise", [0.001, 0.1, 1.0])
    def test_ssim(self, shape: tuple[int, int, int], noise: float) -> None:
        a, b = pair(shape, noise)
        options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
        wanted = structural_similarity(a.numpy(), b.numpy(), channel_axis=0, **options)
        assert ssim(a, b).item() == pytest.approx(wanted, abs=1e-9)
        assert ssim(a.float(), b.float()).item() == pytest.approx(wanted, abs=1e-6)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_psnr(self, shape: tuple[int, int, int]) -> None:
        a, b = pair(shape)
        wanted = peak_signal_noise_ratio(a.numpy(), b.numpy(), data_range=1.0)
        assert psnr(a, b).item() == pytest.approx(wanted, rel=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(11, 40), st.integers(11, 40), st.integers(1, 4), st.integers(0, 1000))
    def test_any_size(self, height: int, width: int, channels: int, seed: int) -> None:
        a, b = pair((channels, height, width), 0.3, seed)
        options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
        wanted = structural_similarity(a.numpy(), b.numpy(), channel_axis=0, **options)
        assert ssim(a, b).item() == pytest.approx(wanted, abs=1e-9)


class TestBatches:
    @pytest.mark.parametrize("metric", [psnr, ssim, nonwhite_error])
    def test_a_batch_is_its_images_one_by_one(self, metric) -> None:
        a, b = pair((2, 4, 3, 16, 20))
        alone = torch.stack([metric(x, y) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)])
        assert metric(a, b).shape == (2, 4)
        torch.testing.assert_close(metric(a, b).flatten(), alone)

    @pytest.mark.parametrize("metric", [psnr, ssim, nonwhite_error])
    def test_half_precision_is_measured_in_double(self, metric) -> None:
        a, b = pair((1, 3, 16, 16))
        low = metric(a.bfloat16(), b.bfloat16())
        assert low.dtype == torch.float64
        assert torch.equal(low, metric(a.bfloat16().double(), b.bfloat16().double()))


class TestEach:
    def test_an_image_has_one_value(self) -> None:
        a, b = torch.rand(2, 3, 3, 16, 16, dtype=torch.double)
        assert torch.equal(each(psnr, a, b), psnr(a, b))
        assert torch.equal(each(ssim, a, b), ssim(a, b))

    def test_of_a_video_the_error_of_all_pixels_counts(self) -> None:
        a, b = torch.rand(2, 4, 5, 3, 16, 12, dtype=torch.double)
        errors = ((a - b) ** 2).mean((1, 2, 3, 4))
        torch.testing.assert_close(each(psnr, a, b), -10 * errors.log10())
        ours = each(nonwhite_error, a, b)
        assert ours.shape == (4,)
        torch.testing.assert_close(ours[1], nonwhite_error(torch.cat(list(a[1]), 1), torch.cat(list(b[1]), 1)))

    def test_of_other_metrics_the_frames_mean_is_taken(self) -> None:
        a, b = torch.rand(2, 4, 5, 3, 16, 12)
        torch.testing.assert_close(each(ssim, a, b), ssim(a, b).mean(1))


class TestNonwhite:
    def test_only_the_subject_counts(self) -> None:
        a = torch.ones(3, 16, 16)
        b = a.clone()
        a[:, :4, :4] = 0.5
        b[:, :4, :4] = 0.25
        assert nonwhite_error(a, b).item() == pytest.approx(0.25)
        assert (a - b).abs().mean().item() < 0.02

    def test_a_pixel_of_the_subject_in_one_of_the_two_counts(self) -> None:
        a, b = torch.ones(3, 4, 4), torch.ones(3, 4, 4)
        a[0, 0, 0], b[0, 1, 1] = 0.4, 0.7
        assert nonwhite_error(a, b).item() == pytest.approx((0.6 + 0.3) / 3 / 2)

    def test_white_on_white_is_no_error(self) -> None:
        assert nonwhite_error(torch.ones(3, 8, 8), torch.full((3, 8, 8), 0.9999)).item() == 0


class TestEqualImages:
    def test_values(self) -> None:
        a, _ = pair((2, 3, 16, 16))
        assert psnr(a, a).tolist() == [math.inf] * 2
        torch.testing.assert_close(ssim(a, a), torch.ones(2, dtype=torch.float64))
        assert nonwhite_error(a, a).tolist() == [0, 0]

    def test_summary_of_nothing_but_equal_images_is_null_in_json(self) -> None:
        summary = Summary.of([math.inf] * 3)
        assert summary.as_dict() == {"mean": None, "p10": None, "worst": None, "count": 3}
        assert Summary.from_dict(summary.as_dict()) == summary

    def test_among_others_they_count_for_the_cap(self) -> None:
        summary = Summary.of([math.inf, 40.0])
        assert summary == Summary((PSNR_CAP + 40) / 2, 40 + 0.1 * (PSNR_CAP - 40), 40.0, 2)


class TestSummary:
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
    def test_agrees_with_numpy(self, values: list[float]) -> None:
        good, bad = Summary.of(values), Summary.of(values, higher_is_better=False)
        assert good.mean == pytest.approx(np.mean(values))
        assert good.p10 == pytest.approx(np.percentile(values, 10))
        assert bad.p10 == pytest.approx(np.percentile(values, 90))
        assert (good.worst, bad.worst, good.count) == (min(values), max(values), len(values))

    def test_nothing_has_no_summary(self) -> None:
        with pytest.raises(ValueError, match="nothing"):
            Summary.of([])

    def test_every_metric_says_which_end_is_good(self) -> None:
        assert {name: metric.higher_is_better for name, metric in METRICS.items()} == {
            "psnr": True,
            "ssim": True,
            "nonwhite_error": False,
            "lpips": False,
        }


class TestAsImages:
    def test_all_output_types_are_the_same_images(self) -> None:
        eighths = torch.randint(0, 256, (2, 3, 8, 10)) / 255
        array = eighths.permute(0, 2, 3, 1).numpy()
        images = [Image.fromarray((entry * 255).round().astype(np.uint8)) for entry in array]
        for output in (eighths, array, images, list(eighths), list(array)):
            torch.testing.assert_close(as_images(output), eighths)
        assert as_images(eighths[0]).shape == as_images(images[0]).shape == (1, 3, 8, 10)

    def test_all_kinds_of_videos_are_the_same_frames(self) -> None:
        frames = torch.randint(0, 256, (2, 5, 3, 8, 10)) / 255
        array = frames.permute(0, 1, 3, 4, 2).numpy()
        images = [[Image.fromarray((f * 255).round().astype(np.uint8)) for f in video] for video in array]
        for output in (frames, array, images, list(frames), list(array)):
            torch.testing.assert_close(as_images(output), frames)
        torch.testing.assert_close(as_images(images[:1]), frames[:1])

    def test_grey_and_transparent_images(self) -> None:
        assert as_images(Image.new("L", (4, 6), 51)).tolist() == torch.full((1, 1, 6, 4), 0.2).tolist()
        assert as_images(Image.new("RGBA", (4, 6))).shape == (1, 3, 6, 4)

    def test_double_stays_double_and_half_becomes_float(self) -> None:
        assert as_images(torch.rand(1, 3, 4, 4).double()).dtype == torch.float64
        assert as_images(torch.rand(1, 3, 4, 4).bfloat16()).dtype == torch.float32

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "rounded; request floats from the pipeline"),
            (np.zeros((1, 4, 4, 3), np.uint8), "rounded"),
            (torch.full((1, 3, 4, 4), -1.0), "range from -1 to -1"),
            (torch.full((1, 3, 4, 4), 255.0), "for latents use latents_as_images"),
            (torch.zeros(4, 4), "3 or 4 dimensions, videos 5"),
            ("apple", "not str"),
            ([], "not list"),
        ],
    )
    def test_what_is_no_float_image_is_refused(self, output: object, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            as_images(output)


class TestLatents:
    def test_the_range_becomes_0_to_1_and_nothing_is_cut(self) -> None:
        latents = torch.tensor([-2.0, 0.0, 2.0, 4.0]).view(1, 2, 2)
        assert latents_as_images(latents, -2, 2).tolist() == [[[[0.0, 0.5], [1.0, 1.5]]]]

    def test_shapes(self) -> None:
        assert latents_as_images(torch.zeros(2, 4, 8, 8), 0, 1).shape == (2, 4, 8, 8)
        assert latents_as_images(torch.zeros(2, 4, 5, 8, 9), 0, 1).shape == (2, 5, 4, 8, 9)

    def test_an_empty_range_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="range"):
            latents_as_images(torch.zeros(1, 4, 4), 1, 1)


class TestRefusals:
    @pytest.mark.parametrize("metric", [psnr, ssim, nonwhite_error])
    def test_bytes_and_other_shapes(self, metric) -> None:
        a = torch.zeros(3, 16, 16)
        with pytest.raises(ConfigError, match="not torch.uint8"):
            metric(a.to(torch.uint8), a)
        with pytest.raises(ConfigError, match=r"\(3, 16, 16\) and \(3, 16, 12\)"):
            metric(a, a[..., :12])

    def test_an_image_smaller_than_the_window(self) -> None:
        with pytest.raises(ConfigError, match="11 x 11; the images are 10 x 64"):
            ssim(torch.zeros(3, 10, 64), torch.zeros(3, 10, 64))


class TestLpips:
    """Expected values are those of the package lpips 0.1.4 with torchvision's AlexNet in single precision."""

    def test_equal_images_and_shapes(self) -> None:
        images = torch.rand(2, 5, 3, 40, 33, generator=torch.Generator().manual_seed(0))
        assert lpips(images, images).tolist() == [[0.0] * 5] * 2
        flat = images.flatten(0, 1)
        assert torch.allclose(lpips(images, 1 - images).flatten(), lpips(flat, 1 - flat))
        assert each(lpips, images, 1 - images).tolist() == pytest.approx(lpips(images, 1 - images).mean(1).tolist())

    def test_more_noise_is_further_away(self) -> None:
        ramp = torch.linspace(0, 1, 64).expand(3, 64, 64)
        noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)) - 0.5
        near, far = (float(lpips(ramp, ramp + scale * noise)) for scale in (0.1, 0.5))
        assert 0 < near < far

    @pytest.mark.parametrize(
        ("change", "expected"), [("inverted", 0.66533), ("mirrored", 0.37998), ("darker", 0.08232)]
    )
    def test_values_of_the_authors_package(self, change: str, expected: float) -> None:
        x = torch.arange(64) / 63
        image = torch.stack([x.expand(64, 64), x[:, None].expand(64, 64), x * x[:, None]])
        changed = {"inverted": 1 - image, "mirrored": image.flip(-1), "darker": image * 0.5}[change]
        assert float(lpips(image, changed)) == pytest.approx(expected, rel=1e-3)  # kernels are stored in float16

    @pytest.mark.parametrize("shape", [(3, 30, 64), (1, 64, 64)])
    def test_what_alexnet_cannot_take(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="RGB images of at least 31 x 31"):
            lpips(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("name", ["images", "frames"])
def test_images_of_an_output_of_any_class(name: str) -> None:
    images = torch.rand(2, 3, 8, 8)
    assert get_images(SimpleNamespace(**{name: images})) is images
    assert get_images((images, None)) is images
    assert get_images(Transformer2DModelOutput(sample=images)) is images
    assert get_images(images) is images
