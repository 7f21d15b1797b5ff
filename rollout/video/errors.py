"""What can go wrong with a video, in sentences that may be shown to the model: short, true, and without local paths."""


class VideoError(ValueError):
    """This video, or these frames of it, cannot be had."""


class VideoTimeout(VideoError):
    """Not within the deadline; another try may do better."""
