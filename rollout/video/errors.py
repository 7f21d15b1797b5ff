"""Video errors. Their messages may be shown to the model: short, true, without local paths."""


class VideoError(ValueError):
    """The video, or some of its frames, cannot be read."""


class VideoUnavailable(VideoError):
    """Not the video's fault; a retry may succeed."""


class VideoTimeout(VideoUnavailable):
    """The deadline passed."""
