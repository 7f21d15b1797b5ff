"""Pictures as the vision tower takes them: what an engine was sent is what the learner computes from."""

from model_port.inputs import Frame
from model_port.processing import VisionContract, process_images
from rollout.picture import Picture


def frame_of(picture: Picture, contract: VisionContract) -> Frame:
    """The patches of a picture, which must have its final size: what is seen here is what was sent elsewhere."""
    patches, grids = process_images([picture.pixels], contract)
    _, down, across = grids[0].tolist()
    if (down * contract.patch_px, across * contract.patch_px) != picture.size_px:
        raise ValueError(
            f"a picture of {picture.size_px} px would be resized to "
            f"{(down * contract.patch_px, across * contract.patch_px)}; resize frames with settled_size"
        )
    return Frame(patches, (down, across))
