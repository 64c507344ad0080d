//! The handshake: both sides compare versions and prove the secret, and the engine describes itself.
//!
//! ```text
//! engine ── Challenge {magic, version, capabilities, needs_secret, nonce} ──▶ client
//! engine ◀── Hello {magic, version, needed capabilities, nonce, proof} ────── client
//! engine ── Welcome {client_index, proof, facts}, or Rejected {why} ───────▶ client
//! ```
//!
//! A proof is an HMAC-SHA-256, keyed with the shared secret, over a label and both nonces. The secret itself is never
//! sent, an overheard proof is useless on another connection, and each side proves itself to the other. Unix sockets
//! need no proof, because the kernel reports the user of the peer's process.

pub(crate) mod facts;
pub(crate) mod node;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{
    error::{DecodeError, EndpointError, Refusal},
    handshake::facts::{EngineFacts, read_facts, write_facts},
    wire::{Reader, Writer},
};

/// Version of the protocol; both sides must have the same.
pub const PROTOCOL_VERSION: u16 = 7;

/// Capabilities of this engine beyond the basic protocol: bit 0 forks, bit 1 grammars.
pub const CAPABILITIES: u64 = 0b11;

/// The first bytes that each side sends. They, and the version after them, keep their place in every version.
const MAGIC: [u8; 4] = *b"rvlm";

/// Size limit of a frame from a client before it is welcomed.
pub(crate) const MAX_HELLO_BYTES: usize = 256;

/// Random bytes of one connection.
pub type Nonce = [u8; 32];
/// A proof of the secret; see the module docs.
pub type Proof = [u8; 32];

/// The engine's first message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Challenge {
    /// The engine's version.
    pub version: u16,
    /// The engine's capabilities.
    pub capabilities: u64,
    /// Whether the client has to prove that it knows the secret.
    pub needs_secret: bool,
    /// A nonce for this connection only.
    pub nonce: Nonce,
}

/// The client's answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The client's version.
    pub version: u16,
    /// Capabilities that the client needs.
    pub capabilities: u64,
    /// A nonce for this connection only.
    pub nonce: Nonce,
    /// The proof that the client knows the secret, if one is needed.
    pub proof: Option<Proof>,
}

/// The engine accepts the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// The upper bits of all keys of this client.
    pub client_index: u32,
    /// The proof that the engine knows the secret too.
    pub proof: Option<Proof>,
    /// What a front end needs to know about the engine.
    pub facts: EngineFacts,
}

impl Challenge {
    pub(crate) fn encode(&self, body: &mut Vec<u8>) {
        let mut body = Writer(body);
        body.raw(&MAGIC);
        body.u16(self.version);
        body.u64(self.capabilities);
        body.bool(self.needs_secret);
        body.raw(&self.nonce);
    }

    /// If the version differs, only the version is read.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut body = Reader::new(body);
        let mut challenge =
            Self { version: read_version(&mut body)?, capabilities: 0, needs_secret: false, nonce: [0; 32] };
        if challenge.version == PROTOCOL_VERSION {
            challenge.capabilities = body.u64()?;
            challenge.needs_secret = body.bool()?;
            challenge.nonce = body.array()?;
            body.finish()?;
        }
        Ok(challenge)
    }
}

impl Hello {
    pub(crate) fn encode(&self, body: &mut Vec<u8>) {
        let mut body = Writer(body);
        body.raw(&MAGIC);
        body.u16(self.version);
        body.u64(self.capabilities);
        body.raw(&self.nonce);
        write_proof(self.proof.as_ref(), &mut body);
    }

    /// If the version differs, only the version is read.
    pub(crate) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut body = Reader::new(body);
        let mut hello =
            Self { version: read_version(&mut body)?, capabilities: 0, nonce: [0; 32], proof: None };
        if hello.version == PROTOCOL_VERSION {
            hello.capabilities = body.u64()?;
            hello.nonce = body.array()?;
            hello.proof = read_proof(&mut body)?;
            body.finish()?;
        }
        Ok(hello)
    }

    /// Check whether the engine that sent `challenge` accepts this client.
    pub(crate) fn check(&self, challenge: &Challenge, secret: Option<&Secret>) -> Result<(), Refusal> {
        if self.version != challenge.version {
            return Err(Refusal::Version { engine: challenge.version, client: self.version });
        }
        let missing = self.capabilities & !challenge.capabilities;
        if missing != 0 {
            return Err(Refusal::Capabilities { missing });
        }
        match secret {
            None => Ok(()),
            Some(secret) => {
                let proof = self.proof.as_ref().ok_or(Refusal::Secret)?;
                if secret.verify(Side::Client, &challenge.nonce, &self.nonce, proof) {
                    Ok(())
                } else {
                    Err(Refusal::Secret)
                }
            }
        }
    }
}

impl Welcome {
    pub(crate) fn encode(&self, body: &mut Vec<u8>) {
        let mut body = Writer(body);
        body.u32(self.client_index);
        write_proof(self.proof.as_ref(), &mut body);
        write_facts(&self.facts, &mut body);
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, DecodeError> {
        let mut body = Reader::new(body);
        let welcome =
            Self { client_index: body.u32()?, proof: read_proof(&mut body)?, facts: read_facts(&mut body)? };
        body.finish()?;
        Ok(welcome)
    }
}

fn read_version(body: &mut Reader<'_>) -> Result<u16, DecodeError> {
    let magic = body.array()?;
    if magic != MAGIC {
        let value = u32::from_le_bytes(magic).into();
        return Err(DecodeError::BadValue { what: "the first word of this protocol", value });
    }
    body.u16()
}

fn write_proof(proof: Option<&Proof>, body: &mut Writer<'_>) {
    body.bool(proof.is_some());
    if let Some(proof) = proof {
        body.raw(proof);
    }
}

fn read_proof(body: &mut Reader<'_>) -> Result<Option<Proof>, DecodeError> {
    Ok(if body.bool()? { Some(body.array()?) } else { None })
}

/// The side that makes a proof; each has its own label.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Client,
    Engine,
    /// A node of a model that runs on several nodes: see `handshake/node.rs`.
    Node,
    Head,
}

/// The secret that both sides of a TCP connection know.
#[derive(Clone)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Fewest bytes of a secret.
    pub const MIN_BYTES: usize = 16;

    /// # Errors
    /// The secret is too short, so that it could be guessed.
    pub fn new(secret: &[u8]) -> Result<Self, EndpointError> {
        if secret.len() < Self::MIN_BYTES {
            return Err(EndpointError::SecretTooShort { num_bytes: secret.len(), minimum: Self::MIN_BYTES });
        }
        Ok(Self(secret.into()))
    }

    fn mac(&self, side: Side, engine_nonce: &Nonce, client_nonce: &Nonce) -> Hmac<Sha256> {
        // HMAC accepts keys of any length.
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&self.0).expect("a key of any length");
        mac.update(match side {
            Side::Client => b"rustvllm client ",
            Side::Engine => b"rustvllm engine ",
            Side::Node => b"rustvllm node   ",
            Side::Head => b"rustvllm head   ",
        });
        mac.update(engine_nonce);
        mac.update(client_nonce);
        mac
    }

    /// Make the proof for one connection.
    pub(crate) fn prove(&self, side: Side, engine_nonce: &Nonce, client_nonce: &Nonce) -> Proof {
        self.mac(side, engine_nonce, client_nonce).finalize().into_bytes().into()
    }

    /// Check a proof, in constant time.
    pub(crate) fn verify(&self, side: Side, engine: &Nonce, client: &Nonce, proof: &Proof) -> bool {
        self.mac(side, engine, client).verify_slice(proof).is_ok()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Fresh random bytes.
pub(crate) fn new_nonce() -> std::io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::{Challenge, Hello, PROTOCOL_VERSION, Secret, Side};
    use crate::error::Refusal;

    #[test]
    fn a_proof_holds_for_one_connection_one_side_and_one_secret() {
        let secret = Secret::new(b"sixteen bytes at least").expect("long enough");
        let other = Secret::new(b"sixteen bytes of others").expect("long enough");
        let proof = secret.prove(Side::Client, &[1; 32], &[2; 32]);
        assert!(secret.verify(Side::Client, &[1; 32], &[2; 32], &proof));
        assert!(!secret.verify(Side::Engine, &[1; 32], &[2; 32], &proof), "a reflected proof");
        assert!(!secret.verify(Side::Client, &[3; 32], &[2; 32], &proof), "a replayed proof");
        assert!(!other.verify(Side::Client, &[1; 32], &[2; 32], &proof));
        assert!(Secret::new(b"short").is_err());
        assert_eq!(format!("{secret:?}"), "Secret(..)");
    }

    #[test]
    fn the_engine_says_why_it_refuses() {
        let challenge =
            Challenge { version: PROTOCOL_VERSION, capabilities: 0b1, needs_secret: true, nonce: [1; 32] };
        let secret = Secret::new(&[7; 32]).expect("long enough");
        let hello = Hello {
            version: PROTOCOL_VERSION,
            capabilities: 0b1,
            nonce: [2; 32],
            proof: Some(secret.prove(Side::Client, &[1; 32], &[2; 32])),
        };
        assert_eq!(hello.check(&challenge, Some(&secret)), Ok(()));
        let newer = Hello { version: 9, ..hello.clone() };
        let refusal = Refusal::Version { engine: PROTOCOL_VERSION, client: 9 };
        assert_eq!(newer.check(&challenge, Some(&secret)), Err(refusal));
        let demanding = Hello { capabilities: 0b101, ..hello.clone() };
        assert_eq!(demanding.check(&challenge, Some(&secret)), Err(Refusal::Capabilities { missing: 0b100 }));
        let silent = Hello { proof: None, ..hello.clone() };
        assert_eq!(silent.check(&challenge, Some(&secret)), Err(Refusal::Secret));
        let guessing = Hello { proof: Some([0; 32]), ..hello };
        assert_eq!(guessing.check(&challenge, Some(&secret)), Err(Refusal::Secret));
        assert_eq!(guessing.check(&challenge, None), Ok(()));
    }
}
