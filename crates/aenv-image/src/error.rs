//! Why an image cannot be used.

use thiserror::Error;

/// Why an image cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The reference cannot be read.
    #[error(
        "{0:?} is no image reference: use registry/name:tag, oci:DIR[:tag], oci-archive:FILE or docker-archive:FILE"
    )]
    Reference(String),
    /// Nothing there.
    #[error("image {reference} was not found: {message}")]
    NotFound {
        /// What was asked for.
        reference: String,
        /// Where it was looked for.
        message: String,
    },
    /// The registry wants (other) credentials.
    #[error("the registry refuses access to {reference}: {message}")]
    Denied {
        /// What was asked for.
        reference: String,
        /// What it said.
        message: String,
    },
    /// Wrong digest, truncated, not an image, ...
    #[error("image {reference} is damaged: {message}")]
    Damaged {
        /// What was asked for.
        reference: String,
        /// What does not fit.
        message: String,
    },
    /// A layer that tries something that no honest layer does, or is beyond a limit.
    #[error("layer {layer} is refused: {message}")]
    Hostile {
        /// Digest of the layer.
        layer: String,
        /// What it tries.
        message: String,
    },
    /// No room.
    #[error("no room for image {reference}: {message}")]
    NoSpace {
        /// What was asked for.
        reference: String,
        /// What is full.
        message: String,
    },
    /// The registry or the network failed.
    #[error("image {reference} could not be fetched: {message}")]
    Unreachable {
        /// What was asked for.
        reference: String,
        /// What happened.
        message: String,
    },
    /// A registry or a layout did not take what was to be published.
    #[error("nothing was published as {target}: {message}")]
    NotPublished {
        /// Where it was to go.
        target: String,
        /// What happened.
        message: String,
    },
    /// The operating system or blockd refused.
    #[error("{context}: {message}")]
    Io {
        /// What was being done.
        context: String,
        /// The refusal.
        message: String,
    },
}

/// Why one layer could not be applied; [`crate::pull`] adds which image and which layer that was.
#[derive(Debug, Error)]
pub(crate) enum LayerError {
    /// Not what the manifest or the format promises.
    #[error("{0}")]
    Damaged(String),
    /// Tries something that no honest layer does, or is beyond a limit.
    #[error("{0}")]
    Hostile(String),
    /// The disk of the image or of the host is full.
    #[error("{0}")]
    NoSpace(String),
    /// The registry or the network failed.
    #[error("{0}")]
    Unreachable(String),
    /// The registry wants (other) credentials.
    #[error("{0}")]
    Denied(String),
    /// The operating system refused.
    #[error("{context}: {message}")]
    Io {
        /// What was being done.
        context: String,
        /// The refusal.
        message: String,
    },
}

impl LayerError {
    /// An error of the operating system while doing `context`.
    pub(crate) fn io(context: impl Into<String>, error: impl Into<std::io::Error>) -> Self {
        let error: std::io::Error = error.into();
        match error.downcast::<LayerError>() {
            Ok(inner) => inner,
            Err(other) if other.kind() == std::io::ErrorKind::StorageFull => {
                Self::NoSpace(format!("{}: {other}", context.into()))
            }
            Err(other) => Self::Io { context: context.into(), message: other.to_string() },
        }
    }

    /// Says which image and which layer it was.
    pub(crate) fn of(self, reference: &str, layer: &str) -> ImageError {
        let reference = reference.to_owned();
        match self {
            Self::Damaged(message) => {
                ImageError::Damaged { reference, message: format!("layer {layer}: {message}") }
            }
            Self::Hostile(message) => ImageError::Hostile { layer: layer.to_owned(), message },
            Self::NoSpace(message) => ImageError::NoSpace { reference, message },
            Self::Unreachable(message) => ImageError::Unreachable { reference, message },
            Self::Denied(message) => ImageError::Denied { reference, message },
            Self::Io { context, message } => ImageError::Io { context, message },
        }
    }
}

/// Lets a `LayerError` pass through [`std::io::Read`].
impl From<LayerError> for std::io::Error {
    fn from(error: LayerError) -> Self {
        std::io::Error::other(error)
    }
}
