import numpy as np
import pytest
from PIL import Image

from rollout.picture import Picture, read_image

ORIENTATION = 0x0112  # EXIF tag
UPRIGHT = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_photo_of_a_turned_camera_is_upright(tmp_path, orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    image.save(tmp_path / "photo.png", exif=exif)
    sizes = []
    picture = read_image(str(tmp_path / "photo.png"), lambda *size_px: sizes.append(size_px) or size_px)
    assert np.array_equal(picture.pixels, UPRIGHT[orientation](pixels)) and sizes == [picture.size_px]


@pytest.mark.parametrize("make", [Picture.of, lambda pixels: Picture("own name", pixels)], ids=["hashed", "named"])
def test_a_picture_keeps_its_pixels_when_a_tool_draws_on(make):
    canvas = np.zeros((28, 56, 4), np.uint8)
    for pixels in (canvas[..., :3], canvas[..., :3].copy()):
        picture = make(pixels)
        pixels[:] = 255
        assert not picture.pixels.any()
    with pytest.raises(ValueError, match="read-only"):
        picture.pixels[:] = 255
