//! What travels over blockd's control socket: one JSON object a line, requests with ids, answers in any order.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::exports::{DiskExport, Export, ExportError, ExportInfo, MemoryExport, Sealed};

/// Longest request line in bytes. A longer one ends the connection.
pub const MAX_REQUEST: usize = 1 << 20;

/// Longest answer line in bytes (a list of many exports with long stacks is far larger than a request).
pub const MAX_RESPONSE: usize = 64 << 20;

/// Version of this protocol. A client and a blockd of different versions refuse each other.
pub const VERSION: u32 = 1;

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum Call {
    /// Who is there.
    Hello,
    /// Show a disk.
    OpenDisk {
        /// The disk.
        export: DiskExport,
    },
    /// Show a memory image.
    OpenMemory {
        /// The image.
        export: MemoryExport,
    },
    /// Seal a disk's upper.
    Seal {
        /// Name of the disk.
        name: String,
        /// File of the layer to be.
        target: PathBuf,
    },
    /// Stop showing a disk.
    CloseDisk {
        /// Name of the disk.
        name: String,
    },
    /// Let go of a memory image.
    CloseMemory {
        /// Who held it.
        holder: String,
    },
    /// Everything that is shown.
    List,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the client; the answer carries it.
    pub id: u64,
    /// What is asked.
    #[serde(flatten)]
    pub call: Call,
}

/// What is answered when a call went well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// To [`Call::Hello`].
    Hello {
        /// [`VERSION`] of the daemon.
        version: u32,
        /// Its process id.
        pid: u32,
        /// How it shows disks. An earlier version, which knows FUSE only, says nothing.
        #[serde(default)]
        export: Option<Export>,
    },
    /// To [`Call::OpenDisk`] and [`Call::OpenMemory`].
    Opened {
        /// What a VMM opens.
        path: PathBuf,
    },
    /// To [`Call::Seal`].
    Sealed {
        /// The layer.
        sealed: Sealed,
    },
    /// To [`Call::CloseDisk`] and [`Call::CloseMemory`].
    Closed,
    /// To [`Call::List`].
    List {
        /// Everything that is shown.
        exports: Vec<ExportInfo>,
    },
}

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The request's id; 0 where the request could not be read.
    pub id: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It went well.
    Ok(Answer),
    /// It did not.
    Error(ExportError),
}

impl From<Result<Answer, ExportError>> for Outcome {
    fn from(result: Result<Answer, ExportError>) -> Self {
        match result {
            Ok(answer) => Self::Ok(answer),
            Err(error) => Self::Error(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_what_the_protocol_says() {
        let request = Request {
            id: 7,
            call: Call::OpenDisk {
                export: DiskExport { name: "a-root".into(), size: 4096, layers: vec![], upper: None },
            },
        };
        assert_eq!(
            serde_json::to_string(&request).unwrap(),
            r#"{"id":7,"call":"open_disk","export":{"name":"a-root","size":4096,"layers":[],"upper":null}}"#
        );
        let response =
            Response { id: 7, outcome: Outcome::Error(ExportError::NotFound { name: "a".into() }) };
        assert_eq!(
            serde_json::to_string(&response).unwrap(),
            r#"{"id":7,"outcome":{"error":{"code":"not_found","name":"a"}}}"#
        );
    }

    #[test]
    fn every_call_survives_the_wire() {
        let calls = [
            Call::Hello,
            Call::OpenMemory {
                export: MemoryExport {
                    holder: "h".into(),
                    size: 8192,
                    layers: vec!["/l".into()],
                    group: None,
                },
            },
            Call::Seal { name: "a".into(), target: "/t".into() },
            Call::CloseDisk { name: "a".into() },
            Call::CloseMemory { holder: "a".into() },
            Call::List,
        ];
        for call in calls {
            let request = Request { id: 1, call };
            let line = serde_json::to_string(&request).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request);
        }
    }
}
