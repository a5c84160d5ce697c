//! Tar as layers carry it: ustar, GNU long names and sparse files, PAX records with binary values.
//!
//! Reads a stream once, forwards only, with bounded memory. Knows nothing of filesystems: what a path may be is decided
//! in `apply`. Formats: POSIX.1-2017 `pax`, "Basic Tar Format" and "Storing Sparse Files" of the GNU tar manual.

mod field;
mod pax;
mod sparse;
#[cfg(test)]
mod tests;

use std::io::{self, Read};

pub(crate) use self::{field::Time, sparse::Extent};
use crate::error::LayerError;

const BLOCK: u64 = 512;
/// Longest PAX header or GNU long name that is read into memory.
const MAX_EXTENSION: u64 = 1 << 20;
/// Linux's `PATH_MAX`, with its terminating zero.
const MAX_PATH: usize = 4096;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file with data.
    Regular,
    /// Another name of an earlier entry or of a file of a lower layer.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A folder.
    Directory,
    /// A named pipe.
    Fifo,
}

/// One entry of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Its name, as the archive gives it.
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last change.
    pub mtime: Time,
    /// Time of the last access, where given.
    pub atime: Option<Time>,
    /// Extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes of the file, holes counted.
    pub size: u64,
    /// Pieces of a sparse file.
    pub extents: Option<Vec<Extent>>,
    /// Major and minor number of a device.
    pub device: (u32, u32),
}

/// Reads a tar stream.
pub(crate) struct TarReader<R> {
    input: R,
    /// Bytes of the current entry's data that are still on the tape.
    data_left: u64,
    /// Bytes between its data and the next header.
    padding: u64,
    global: pax::Records,
}

/// What precedes an entry and describes it.
#[derive(Default)]
struct Prelude {
    records: Option<pax::Records>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl<R: Read> TarReader<R> {
    /// Reads from the start of an archive.
    pub(crate) fn new(input: R) -> Self {
        Self { input, data_left: 0, padding: 0, global: pax::Records::default() }
    }

    /// What is left of the stream after the archive's end.
    pub(crate) fn into_inner(self) -> R {
        self.input
    }

    /// The next entry; what was not read of the last one's data is skipped. `None` at the end of the archive.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, LayerError> {
        let mut prelude = Prelude::default();
        loop {
            self.skip(self.data_left + self.padding)?;
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let size = field::unsigned(&header[124..136])?;
            match header[156] {
                b'x' => prelude.records.get_or_insert_default().parse(&self.extension(size)?)?,
                b'g' => {
                    let bytes = self.extension(size)?;
                    self.global.parse(&bytes)?;
                }
                b'L' => prelude.long_name = Some(until_zero(&self.extension(size)?).to_vec()),
                b'K' => prelude.long_link = Some(until_zero(&self.extension(size)?).to_vec()),
                _ => return self.entry(&header, size, prelude).map(Some),
            }
        }
    }

    /// Reads from the current entry's data; 0 at its end.
    pub(crate) fn read_data(&mut self, buf: &mut [u8]) -> Result<usize, LayerError> {
        let want = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buf.len());
        if want == 0 {
            return Ok(0);
        }
        let got = loop {
            match self.input.read(&mut buf[..want]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(|error| LayerError::io("reading the layer", error))?,
            }
        };
        if got == 0 {
            return Err(LayerError::Damaged("it ends in the middle of a file".to_owned()));
        }
        self.data_left -= got as u64;
        Ok(got)
    }

    fn skip(&mut self, bytes: u64) -> Result<(), LayerError> {
        let skipped = io::copy(&mut (&mut self.input).take(bytes), &mut io::sink())
            .map_err(|error| LayerError::io("reading the layer", error))?;
        if skipped != bytes {
            return Err(LayerError::Damaged("it ends in the middle of a file".to_owned()));
        }
        (self.data_left, self.padding) = (0, 0);
        Ok(())
    }

    /// The next header block, checked; `None` at the end.
    fn header(&mut self) -> Result<Option<[u8; 512]>, LayerError> {
        let mut header = [0; 512];
        let mut filled = 0;
        while filled < header.len() {
            match self.input.read(&mut header[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(LayerError::Damaged("it ends in the middle of a header".to_owned())),
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LayerError::io("reading the layer", error)),
            }
        }
        if header.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let around = || header[..148].iter().chain(b"        ").chain(&header[156..]);
        let sum: i64 = around().map(|byte| i64::from(*byte)).sum();
        // Some old archivers summed signed bytes.
        let signed_sum: i64 = around().map(|byte| i64::from(byte.cast_signed())).sum();
        let stated = field::number(&header[148..156]).ok();
        if stated != Some(sum) && stated != Some(signed_sum) {
            return Err(LayerError::Damaged("it is no tar archive: a header's checksum is wrong".to_owned()));
        }
        Ok(Some(header))
    }

    /// Reads the data of an extension header.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>, LayerError> {
        if size > MAX_EXTENSION {
            return Err(LayerError::Hostile(format!("an extension header of {size} bytes")));
        }
        (self.data_left, self.padding) = (size, size.next_multiple_of(BLOCK) - size);
        let mut bytes = vec![0; usize::try_from(size).expect("below MAX_EXTENSION")];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += self.read_data(&mut bytes[filled..])?;
        }
        Ok(bytes)
    }

    fn block(&mut self) -> Result<[u8; 512], LayerError> {
        let mut block = [0; 512];
        self.input.read_exact(&mut block).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => LayerError::Damaged("it ends in the middle of a map".to_owned()),
            _ => LayerError::io("reading the layer", error),
        })?;
        Ok(block)
    }

    fn entry(&mut self, header: &[u8; 512], size: u64, prelude: Prelude) -> Result<Entry, LayerError> {
        let records = prelude.records.unwrap_or_default().over(&self.global);
        let ustar = &header[257..263] == b"ustar\0";
        let gnu = &header[257..265] == b"ustar  \0";

        let path = match (prelude.long_name, records.get("path"), records.get("GNU.sparse.name")) {
            (_, _, Some(name)) | (_, Some(name), None) => name.to_vec(),
            (Some(name), None, None) => name,
            (None, None, None) => header_path(header, ustar),
        };
        let link = match (prelude.long_link, records.get("linkpath")) {
            (_, Some(link)) => link.to_vec(),
            (Some(link), None) => link,
            (None, None) => until_zero(&header[157..257]).to_vec(),
        };
        for name in [&path, &link] {
            if name.len() >= MAX_PATH || name.contains(&0) {
                return Err(LayerError::Hostile("a name that is too long or holds a zero byte".to_owned()));
            }
        }
        let kind = match header[156] {
            b'0' | 0 | b'7' | b'S' if path.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' | b'S' => Kind::Regular,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => {
                let kind = char::from(other).escape_default();
                return Err(LayerError::Damaged(format!("an entry of the unknown type '{kind}'")));
            }
        };
        let size = records.get("size").map_or(Ok(size), field::decimal)?;
        let on_tape = if kind == Kind::Regular { size } else { 0 };
        (self.data_left, self.padding) = (on_tape, padding_of(on_tape)?);

        let (size, extents) = match (kind, header[156] == b'S') {
            (Kind::Regular, true) if gnu => self.old_sparse(header)?,
            (Kind::Regular, true) => {
                return Err(LayerError::Damaged("a sparse entry without GNU's header".to_owned()));
            }
            (Kind::Regular, false) => self.pax_sparse(&records, size)?,
            _ => (0, None),
        };
        let id = |key, range: std::ops::Range<usize>| -> Result<u32, LayerError> {
            let value = records.get(key).map_or_else(|| field::unsigned(&header[range]), field::decimal)?;
            match u32::try_from(value) {
                Ok(id) if id != u32::MAX => Ok(id),
                _ => Err(LayerError::Damaged(format!("an owner {value} that is none"))),
            }
        };
        let device = |range: std::ops::Range<usize>| -> Result<u32, LayerError> {
            u32::try_from(field::unsigned(&header[range])?)
                .map_err(|_| LayerError::Damaged("a device number that is none".to_owned()))
        };
        let is_device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
        let mtime = match records.get("mtime") {
            Some(text) => field::time(text)?,
            None => Time { seconds: field::number(&header[136..148])?, nanos: 0 },
        };
        Ok(Entry {
            path,
            link,
            kind,
            mode: u32::try_from(field::unsigned(&header[100..108])? & 0o7777).expect("12 bits fit"),
            uid: id("uid", 108..116)?,
            gid: id("gid", 116..124)?,
            mtime,
            atime: records.get("atime").map(field::time).transpose()?,
            xattrs: records.xattrs(),
            size,
            extents,
            device: if is_device { (device(329..337)?, device(337..345)?) } else { (0, 0) },
        })
    }

    /// Size and map of a file in GNU's old form; reads its extension blocks.
    fn old_sparse(&mut self, header: &[u8; 512]) -> Result<(u64, Option<Vec<Extent>>), LayerError> {
        let mut map = Vec::new();
        sparse::push_old(&mut map, &header[386..482])?;
        let mut more = header[482] != 0;
        while more {
            let block = self.block()?;
            sparse::push_old(&mut map, &block[..504])?;
            more = block[504] != 0;
        }
        let size = field::unsigned(&header[483..495])?;
        self.check_map(size, map)
    }

    /// Size and map of a file that may be sparse in a PAX form.
    fn pax_sparse(
        &mut self,
        records: &pax::Records,
        size: u64,
    ) -> Result<(u64, Option<Vec<Extent>>), LayerError> {
        let real_size = records.get("GNU.sparse.realsize").or_else(|| records.get("GNU.sparse.size"));
        if records.get("GNU.sparse.major") == Some(b"1") {
            let real_size = field::decimal(real_size.unwrap_or_default())?;
            let (map, taken) = sparse::from_data(|| self.block())?;
            self.data_left = self
                .data_left
                .checked_sub(taken)
                .ok_or_else(|| LayerError::Damaged("the map of a sparse file is malformed".to_owned()))?;
            return self.check_map(real_size, map);
        }
        match sparse::from_records(records)? {
            Some(map) => {
                let real_size = field::decimal(real_size.unwrap_or_default())?;
                self.check_map(real_size, map)
            }
            None => Ok((size, None)),
        }
    }

    /// The pieces must be just what is on the tape, and inside the file.
    fn check_map(&self, size: u64, map: Vec<Extent>) -> Result<(u64, Option<Vec<Extent>>), LayerError> {
        let stored: u64 = map.iter().map(|extent| extent.len).sum();
        let end = map.last().map_or(0, |last| last.offset + last.len);
        if stored != self.data_left || end > size {
            return Err(LayerError::Damaged("the map of a sparse file does not fit its data".to_owned()));
        }
        Ok((size, Some(map)))
    }
}

fn padding_of(size: u64) -> Result<u64, LayerError> {
    size.checked_next_multiple_of(BLOCK)
        .map(|whole| whole - size)
        .ok_or_else(|| LayerError::Hostile(format!("a file of {size} bytes")))
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

/// Name and, in ustar headers, prefix.
fn header_path(header: &[u8; 512], ustar: bool) -> Vec<u8> {
    let name = until_zero(&header[..100]);
    let prefix = until_zero(&header[345..500]);
    if ustar && !prefix.is_empty() {
        return [prefix, b"/", name].concat();
    }
    name.to_vec()
}
