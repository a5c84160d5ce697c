use std::sync::Arc;

use proptest::prelude::*;

use super::{
    server::Server,
    xdr::{Reader, Writer},
};
use crate::{Volume, tests::volume};

const NFS: u32 = 100_003;
const MOUNT: u32 = 100_005;

/// A client that speaks to a server without a network.
struct Client {
    server: Server,
    uid: u32,
    id: std::cell::Cell<u32>,
}

impl Client {
    fn new(volumes: Vec<Arc<Volume>>, uid: u32) -> Self {
        Self { server: Server::new(volumes), uid, id: std::cell::Cell::new(0) }
    }

    fn request(&self, program: u32, version: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
        let mut call = Writer::default();
        self.id.set(self.id.get() + 1);
        let mut auth = Writer::default();
        auth.u32(0);
        auth.opaque(b"guest");
        for word in [self.uid, self.uid, 0] {
            auth.u32(word);
        }
        for word in [self.id.get(), 0, 2, program, version, procedure, 1] {
            call.u32(word);
        }
        call.opaque(&auth.0);
        call.u32(0);
        call.u32(0);
        call.0.extend_from_slice(arguments);
        call.0
    }

    /// The results, without the frame; the word is how the call was taken.
    fn call(&self, program: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> (u32, Vec<u8>) {
        let mut out = Writer::default();
        arguments(&mut out);
        let answer = self.server.answer(&self.request(program, 3, procedure, &out.0)).unwrap();
        assert_eq!(answer[0], 0x80);
        (u32::from_be_bytes(answer[24..28].try_into().unwrap()), answer[28..].to_vec())
    }

    /// A call whose first result is a status.
    fn nfs(&self, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> (u32, Vec<u8>) {
        let (taken, results) = self.call(NFS, procedure, arguments);
        assert_eq!(taken, 0, "procedure {procedure} was not taken");
        (u32::from_be_bytes(results[..4].try_into().unwrap()), results[4..].to_vec())
    }

    fn mount(&self, path: &str) -> Result<Vec<u8>, u32> {
        let (_, results) = self.call(MOUNT, 1, |out| out.opaque(path.as_bytes()));
        let mut results = Reader(&results);
        match results.u32().unwrap() {
            0 => Ok(results.opaque(64).unwrap().to_vec()),
            status => Err(status),
        }
    }

    fn make(&self, procedure: u32, folder: &[u8], name: &str, how: &[u32]) -> Result<Vec<u8>, u32> {
        let (status, results) = self.nfs(procedure, |out| {
            out.opaque(folder);
            out.opaque(name.as_bytes());
            how.iter().for_each(|word| out.u32(*word));
        });
        let mut results = Reader(&results);
        if status != 0 {
            return Err(status);
        }
        assert!(results.flag().unwrap());
        Ok(results.opaque(64).unwrap().to_vec())
    }

    fn write(&self, file: &[u8], offset: u64, bytes: &[u8]) -> u32 {
        let length = u32::try_from(bytes.len()).unwrap();
        let written = self.nfs(7, |out| {
            out.opaque(file);
            out.u64(offset);
            out.u32(length);
            out.u32(2);
            out.opaque(bytes);
        });
        written.0
    }

    fn in_folder(&self, procedure: u32, folder: &[u8], name: &str) -> u32 {
        let done = self.nfs(procedure, |out| {
            out.opaque(folder);
            out.opaque(name.as_bytes());
        });
        done.0
    }
}

/// A mode, and nothing else.
const MODE_644: [u32; 7] = [1, 0o644, 0, 0, 0, 0, 0];
const FILE: [u32; 8] = [1, 1, 0o644, 0, 0, 0, 0, 0];

#[test]
fn a_file_lives_and_a_restarted_server_knows_it() {
    let (_home, volume) = volume();
    let client = Client::new(vec![volume.clone()], 0);
    assert_eq!(client.mount("/other"), Err(2));
    let root = client.mount(&format!("/{}", volume.id())).unwrap();
    let file = client.make(8, &root, "f", &FILE).unwrap();
    assert_eq!(client.make(8, &root, "f", &FILE), Err(17));
    assert_eq!(client.write(&file, 2, b"cd"), 0);
    assert_eq!(client.write(&file, 0, b"ab"), 0);
    let read = |client: &Client| {
        client.nfs(6, |out| {
            out.opaque(&file);
            out.u64(0);
            out.u32(100);
        })
    };
    assert!(read(&client).1.ends_with(b"abcd"));
    let again = Client::new(vec![volume.clone()], 0);
    assert!(read(&again).1.ends_with(b"abcd"));
    let folder = again.make(9, &root, "d", &MODE_644).unwrap();
    assert_eq!(again.in_folder(13, &root, "d"), 0);
    assert_eq!(again.make(8, &folder, "x", &FILE), Err(70), "the folder is gone");
    assert_eq!(again.in_folder(12, &root, "f"), 0);
    assert_eq!(read(&again).0, 70);
}

#[test]
fn names_and_handles_that_lead_out_are_refused() {
    let ((_one, mine), (_two, others)) = (volume(), volume());
    let client = Client::new(vec![mine.clone()], 0);
    let root = client.mount(&format!("/{}", mine.id())).unwrap();
    for name in ["", ".", "..", "a/b", "/etc", "a\0b"] {
        assert_eq!(client.make(8, &root, name, &FILE), Err(22), "{name:?}");
        assert_eq!(client.in_folder(12, &root, name), 22, "{name:?}");
    }
    assert_eq!(client.make(8, &root, &"x".repeat(256), &FILE), Err(63));
    let foreign = others.seal(&crate::sys::handle_of(others.root()).unwrap());
    assert_eq!(client.make(8, &foreign, "f", &FILE), Err(10001));
    // The root's parent is the root.
    let up = client.nfs(3, |out| {
        out.opaque(&root);
        out.opaque(b"..");
    });
    assert_eq!((up.0, Reader(&up.1).opaque(64).unwrap()), (0, &root[..]));
    // A device is never made.
    assert_eq!(client.make(11, &root, "dev", &[4, 0, 0, 0, 0, 0, 0, 1, 3]), Err(10004));
    // A link is a text.
    let link = client.nfs(10, |out| {
        out.opaque(&root);
        out.opaque(b"link");
        [0; 6].iter().for_each(|word| out.u32(*word));
        out.opaque(b"/etc/passwd");
    });
    assert_eq!(link.0, 0);
    let found = client.nfs(3, |out| {
        out.opaque(&root);
        out.opaque(b"link");
    });
    let handle = Reader(&found.1).opaque(64).unwrap().to_vec();
    let read = client.nfs(6, |out| {
        out.opaque(&handle);
        out.u64(0);
        out.u32(9);
    });
    assert_eq!(read.0, 22);
    assert_eq!(client.write(&handle, 0, b"x"), 22);
}

#[test]
fn users_have_their_own_rights() {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let (_home, volume) = volume();
    let (root, user) = (Client::new(vec![volume.clone()], 0), Client::new(vec![volume.clone()], 1000));
    let top = root.mount(&format!("/{}", volume.id())).unwrap();
    let private = root.make(9, &top, "private", &[1, 0o755, 0, 0, 0, 0, 0]).unwrap();
    assert_eq!(user.make(8, &private, "f", &FILE), Err(13));
    assert_eq!(user.in_folder(12, &private, "f"), 2);
    let own = user.make(8, &top, "own", &FILE).unwrap();
    let stat = rustix::fs::statat(volume.root(), "own", rustix::fs::AtFlags::empty()).unwrap();
    assert_eq!((stat.st_uid, stat.st_mode & 0o7777), (1000, 0o644));
    let set = |client: &Client, file: &[u8], words: &[u32]| {
        client.nfs(2, |out| {
            out.opaque(file);
            words.iter().for_each(|word| out.u32(*word));
        })
    };
    // Only root gives a file away; only the owner changes its permissions.
    assert_eq!(set(&user, &own, &[0, 1, 0, 0, 0, 0, 0, 0]).0, 1);
    assert_eq!(set(&Client::new(vec![volume.clone()], 1001), &own, &[1, 0o777, 0, 0, 0, 0, 0, 0]).0, 1);
    assert_eq!(set(&user, &own, &[1, 0o600, 0, 0, 0, 0, 0, 0]).0, 0);
    assert_eq!(set(&root, &own, &[0, 1, 77, 0, 0, 0, 0, 0]).0, 0);
    let rights = user.nfs(4, |out| {
        out.opaque(&private);
        out.u32(0x3f);
    });
    assert_eq!(rights.1[rights.1.len() - 4..], [0, 0, 0, 3]);
}

#[test]
fn a_folder_is_read_in_pieces_and_each_entry_once() {
    let (_home, volume) = volume();
    let client = Client::new(vec![volume.clone()], 0);
    let root = client.mount(&format!("/{}", volume.id())).unwrap();
    for number in 0..200 {
        client.make(8, &root, &format!("file-{number}"), &FILE).unwrap();
    }
    for procedure in [16, 17] {
        let (mut cookie, mut names) = (0, Vec::new());
        for _ in 0..200 {
            let (status, results) = client.nfs(procedure, |out| {
                out.opaque(&root);
                out.u64(cookie);
                out.u64(0);
                out.u32(1024);
                if procedure == 17 {
                    out.u32(2048);
                }
            });
            assert_eq!(status, 0);
            let mut read = Reader(&results);
            assert!(read.flag().unwrap());
            read.fixed(84).unwrap();
            read.u64().unwrap();
            while read.flag().unwrap() {
                read.u64().unwrap();
                names.push(String::from_utf8(read.opaque(255).unwrap().to_vec()).unwrap());
                cookie = read.u64().unwrap();
                if procedure == 17 {
                    read.optional(|read| read.fixed(84).map(drop)).unwrap();
                    read.optional(|read| read.opaque(64).map(drop)).unwrap();
                }
            }
            if read.flag().unwrap() {
                break;
            }
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 202, "procedure {procedure}");
    }
}

#[test]
fn a_call_that_is_sent_again_is_not_done_again() {
    let (_home, volume) = volume();
    let client = Client::new(vec![volume.clone()], 0);
    let root = client.mount(&format!("/{}", volume.id())).unwrap();
    let mut arguments = Writer::default();
    arguments.opaque(&root);
    arguments.opaque(b"d");
    MODE_644.iter().for_each(|word| arguments.u32(*word));
    let request = client.request(NFS, 3, 9, &arguments.0);
    let first = client.server.answer(&request).unwrap();
    assert_eq!(client.server.answer(&request).unwrap(), first);
    assert_eq!(client.make(9, &root, "d", &MODE_644), Err(17));
}

#[test]
fn the_quota_holds() {
    let (_home, volume) = volume();
    let client = Client::new(vec![volume.clone()], 0);
    let root = client.mount(&format!("/{}", volume.id())).unwrap();
    let file = client.make(8, &root, "f", &FILE).unwrap();
    let block = vec![7; 256 << 10];
    let outcomes: Vec<_> = (0..8).map(|number| client.write(&file, number << 18, &block)).collect();
    assert_eq!((outcomes[0], outcomes[7]), (0, 69), "{outcomes:?}");
    assert_eq!(client.in_folder(12, &root, "f"), 0);
    assert!(volume.used() < 64 << 10);
}

#[test]
fn other_programs_and_versions_are_refused() {
    let (_home, volume) = volume();
    let client = Client::new(vec![volume], 0);
    assert_eq!(client.call(100_227, 1, |_| {}).0, 1);
    assert_eq!(client.call(NFS, 99, |_| {}).0, 3);
    assert_eq!(client.call(NFS, 1, |out| out.u32(u32::MAX)).0, 4);
    let answer = client.server.answer(&client.request(NFS, 4, 0, &[])).unwrap();
    assert_eq!(answer[24..], [0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 3]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_bytes_break_it(procedure in 0_u32..23, arguments in prop::collection::vec(any::<u8>(), 0..200), with_handle: bool) {
        let (_home, volume) = volume();
        let client = Client::new(vec![volume.clone()], 0);
        let mut out = Writer::default();
        if with_handle {
            out.opaque(&client.mount(&format!("/{}", volume.id())).unwrap());
        }
        out.0.extend_from_slice(&arguments);
        client.server.answer(&client.request(NFS, 3, procedure, &out.0));
        client.server.answer(&arguments);
    }
}
