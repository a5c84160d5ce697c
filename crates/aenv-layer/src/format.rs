//! Headers and trailers of LSMT files.

use uuid::Uuid;

/// Bytes of a header and of a trailer.
pub(crate) const HEADER_SIZE: u64 = 4096;

/// Layers that a stack may have, the upper not counted.
pub const MAX_STACK_LAYERS: usize = 255;

/// Entries that an index may have. Far above what a disk needs, and low enough that a lying header cannot exhaust memory.
pub(crate) const MAX_INDEX: u64 = 1 << 24;

const MAGIC0: &[u8; 8] = b"LSMT\0\x01\x02\0";
const MAGIC1: [u8; 16] =
    [0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a];
const STRUCT_SIZE: u32 = 390;
const VERSION: u8 = 1;
const SUB_VERSION: u8 = 1;
const UUID_TEXT: usize = 36;

const FLAG_HEADER: u32 = 1;
const FLAG_DATA: u32 = 1 << 1;
const FLAG_SEALED: u32 = 1 << 2;

/// Which of the format's blocks this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The header of a layer that was written sealed.
    SealedHeader,
    /// The header of an upper's data file; stays in place when it is sealed.
    DataHeader,
    /// The header of an upper's index file.
    IndexHeader,
    /// The trailer of a sealed layer.
    Trailer,
}

impl Role {
    fn flags(self) -> u32 {
        match self {
            Self::SealedHeader => FLAG_HEADER | FLAG_DATA | FLAG_SEALED,
            Self::DataHeader => FLAG_HEADER | FLAG_DATA,
            Self::IndexHeader => FLAG_HEADER,
            Self::Trailer => FLAG_DATA | FLAG_SEALED,
        }
    }

    fn from_flags(flags: u32) -> Option<Self> {
        let roles = [Self::SealedHeader, Self::DataHeader, Self::IndexHeader, Self::Trailer];
        roles.into_iter().find(|role| role.flags() == flags & (FLAG_HEADER | FLAG_DATA | FLAG_SEALED))
    }
}

/// What a header or trailer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub role: Role,
    /// In bytes; zero in headers of layers, whose trailer says it.
    pub index_offset: u64,
    /// In entries.
    pub index_len: u64,
    /// In bytes.
    pub virtual_size: u64,
    pub uuid: Uuid,
    /// The layer beneath; nil when unknown.
    pub parent: Uuid,
}

impl Block {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_SIZE as usize);
        out.extend(MAGIC0);
        out.extend(MAGIC1);
        out.extend(STRUCT_SIZE.to_le_bytes());
        out.extend(self.role.flags().to_le_bytes());
        out.extend(self.index_offset.to_le_bytes());
        out.extend(self.index_len.to_le_bytes());
        out.extend(self.virtual_size.to_le_bytes());
        for uuid in [self.uuid, self.parent] {
            out.extend(uuid.hyphenated().encode_lower(&mut [0; UUID_TEXT]).as_bytes());
            out.push(0);
        }
        out.extend([0, 0, VERSION, SUB_VERSION]);
        out.resize(HEADER_SIZE as usize, 0);
        out
    }

    /// Reads a block, or says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_SIZE as usize]) -> Result<Self, &'static str> {
        if !has_magic(bytes) {
            return Err("the LSMT magic is missing");
        }
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let flags = u32::from_le_bytes(std::array::from_fn(|i| bytes[28 + i]));
        let uuid_at = |at: usize| {
            let text = std::str::from_utf8(&bytes[at..at + UUID_TEXT]).unwrap_or_default();
            Uuid::parse_str(text).unwrap_or_default()
        };
        Ok(Self {
            role: Role::from_flags(flags).ok_or("its flags fit no kind of block")?,
            index_offset: u64_at(32),
            index_len: u64_at(40),
            virtual_size: u64_at(48),
            uuid: uuid_at(56),
            parent: uuid_at(93),
        })
    }
}

/// Whether bytes begin as an LSMT block does.
pub(crate) fn has_magic(bytes: &[u8]) -> bool {
    bytes.len() >= 24 && bytes[..8] == *MAGIC0 && bytes[8..24] == MAGIC1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(role: Role) -> Block {
        let uuid = Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);
        Block { role, index_offset: 8192, index_len: 3, virtual_size: 1 << 30, uuid, parent: Uuid::nil() }
    }

    #[test]
    fn fields_are_where_the_format_says() {
        let bytes = block(Role::Trailer).encode();
        assert_eq!(bytes.len(), 4096);
        assert_eq!(&bytes[..8], b"LSMT\0\x01\x02\0");
        assert_eq!(bytes[24..28], 390_u32.to_le_bytes());
        assert_eq!(bytes[28..32], 6_u32.to_le_bytes());
        assert_eq!(bytes[32..40], 8192_u64.to_le_bytes());
        assert_eq!(bytes[40..48], 3_u64.to_le_bytes());
        assert_eq!(bytes[48..56], (1_u64 << 30).to_le_bytes());
        assert_eq!(&bytes[56..93], b"00112233-4455-6677-8899-aabbccddeeff\0");
        assert_eq!(&bytes[93..130], b"00000000-0000-0000-0000-000000000000\0");
        assert_eq!(bytes[130..134], [0, 0, 1, 1]);
        assert!(bytes[134..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn every_role_round_trips() {
        for role in [Role::SealedHeader, Role::DataHeader, Role::IndexHeader, Role::Trailer] {
            let bytes: [u8; 4096] = block(role).encode().try_into().unwrap();
            assert_eq!(Block::decode(&bytes), Ok(block(role)));
        }
    }

    #[test]
    fn wrong_magic_and_flags_are_refused() {
        let mut bytes: [u8; 4096] = block(Role::Trailer).encode().try_into().unwrap();
        bytes[28] = 0;
        assert!(Block::decode(&bytes).is_err());
        bytes[28] = 6;
        bytes[8] ^= 1;
        assert!(Block::decode(&bytes).is_err());
    }
}
