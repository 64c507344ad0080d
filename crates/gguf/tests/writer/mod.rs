//! Writes small files, right ones and wrong ones.

/// A tensor as it is written down.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// The fastest dimension first, as in a file.
    pub(crate) shape: Vec<u64>,
    pub(crate) id: u32,
    /// None: behind the one before.
    pub(crate) offset: Option<u64>,
    pub(crate) num_bytes: u64,
}

/// A file; counts that are None are true.
pub(crate) struct Writer {
    pub(crate) version: u32,
    pub(crate) num_tensors: Option<u64>,
    pub(crate) num_keys: Option<u64>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) keys: u64,
    pub(crate) metadata: Vec<u8>,
}

impl Writer {
    pub(crate) fn raw_value(&mut self, key: &str, id: u32, bytes: &[u8]) {
        text(&mut self.metadata, key);
        self.metadata.extend(id.to_le_bytes());
        self.metadata.extend(bytes);
        self.keys += 1;
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) {
        self.raw_value(key, 4, &value.to_le_bytes());
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.raw_value(key, 8, &bytes);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.num_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.num_keys.unwrap_or(self.keys).to_le_bytes());
        bytes.extend(&self.metadata);
        let mut end = 0_u64;
        for tensor in &self.tensors {
            text(&mut bytes, &tensor.name);
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            for dimension in &tensor.shape {
                bytes.extend(dimension.to_le_bytes());
            }
            bytes.extend(tensor.id.to_le_bytes());
            bytes.extend(tensor.offset.unwrap_or(end).to_le_bytes());
            end = (end + tensor.num_bytes).next_multiple_of(32);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        let last = self.tensors.last().map_or(0, |tensor| tensor.num_bytes);
        let end = end - last.next_multiple_of(32) + last;
        bytes.resize(bytes.len() + end as usize, 7);
        bytes
    }
}

fn text(bytes: &mut Vec<u8>, value: &str) {
    bytes.extend((value.len() as u64).to_le_bytes());
    bytes.extend(value.as_bytes());
}

/// A right file: a value of several kinds, a tensor of `Q8_0` and one of `F32`.
pub(crate) fn sample() -> Writer {
    let tensor = |name: &str, shape: &[u64], id, num_bytes| Tensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        id,
        offset: None,
        num_bytes,
    };
    let tensors = vec![tensor("a.weight", &[32, 3], 8, 102), tensor("b.weight", &[5], 0, 20)];
    let (num_tensors, num_keys) = (None, None);
    let mut writer = Writer { version: 3, num_tensors, num_keys, tensors, keys: 0, metadata: Vec::new() };
    writer.text("general.architecture", "llama");
    writer.u32("llama.block_count", 2);
    writer.raw_value("llama.rope.freq_base", 6, &10_000_f32.to_le_bytes());
    writer.raw_value("tokenizer.ggml.add_bos_token", 7, &[1]);
    let mut tokens = [8_u32.to_le_bytes().to_vec(), 3_u64.to_le_bytes().to_vec()].concat();
    for token in ["<s>", "▁a", "é"] {
        text(&mut tokens, token);
    }
    writer.raw_value("tokenizer.ggml.tokens", 9, &tokens);
    let scores = [6_u32.to_le_bytes().to_vec(), 2_u64.to_le_bytes().to_vec(), vec![0; 8]].concat();
    writer.raw_value("tokenizer.ggml.scores", 9, &scores);
    writer
}
