"""Video errors. Their messages may be shown to the model: short, true, without local paths."""


class VideoError(ValueError):
    """The video, or some of its frames, cannot be read."""


class VideoTimeout(VideoError):
    """The deadline passed; a retry may succeed."""
