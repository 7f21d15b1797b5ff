"""Video errors. Models and clients may see their messages, so these are short, true and without local paths."""


class VideoError(ValueError):
    """The video, or some of its frames, cannot be read."""


class VideoUnavailable(VideoError):
    """The failure is not the video's fault; a retry may succeed."""


class VideoTimeout(VideoUnavailable):
    """The deadline passed."""


class ImageError(VideoError):
    """An image cannot be read. The message has its path, for a run's log, so no client may see it."""
