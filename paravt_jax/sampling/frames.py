"""Converts pictures to the vision tower's input."""

from model_port.inputs import Frame
from model_port.processing import VisionContract, process_images
from rollout.picture import Picture


def frame_of(picture: Picture, contract: VisionContract) -> Frame:
    """The patches of a picture. It must have its final size, so that engine and learner use the same pixels."""
    patches, grids = process_images([picture.pixels], contract)
    _, down, across = grids[0].tolist()
    if (down * contract.patch_px, across * contract.patch_px) != picture.size_px:
        raise ValueError(
            f"a picture of {picture.size_px} px would be resized to "
            f"{(down * contract.patch_px, across * contract.patch_px)}; resize frames with settled_size"
        )
    return Frame(patches, (down, across))
