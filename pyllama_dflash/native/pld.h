/*
 * The C boundary of pyllama_dflash. This file is the C header and, read as it is, the cffi cdef: declarations only, no
 * preprocessor lines. A change here must raise PLD_ABI_VERSION; sizes of the structs are compared at import.
 *
 * Conventions
 *   - A function that can fail returns a status: PLD_OK or one of the negative PLD_E_* codes. The message of the calling
 *     thread's last failure is pld_last_error(). Counts are returned as values >= 0 where it says so.
 *   - No C++ exception leaves a function. A handle is used by one thread at a time; different handles are independent.
 *   - Handles own what they need: an engine keeps its models alive, so the two may be freed in any order.
 *   - Text is UTF-8 in byte buffers with explicit lengths. A text function returns the length it needs; it writes only
 *     what fits in `cap` bytes, so a second call with a larger buffer gets all of it.
 *   - Token ids are int32, logits and scores float32, times int64 microseconds of a monotonic clock.
 */

enum { PLD_ABI_VERSION = 8, PLD_MAX_DEVICES = 16 };

enum pld_status {
    PLD_OK = 0,
    PLD_E_ARGUMENT = -1,     /* a value out of range; nothing was changed */
    PLD_E_LOAD = -2,         /* a file that is missing, damaged or not supported */
    PLD_E_PAIR = -3,         /* target and draft do not belong together */
    PLD_E_CONTEXT_FULL = -4, /* more tokens than n_ctx; nothing was changed */
    PLD_E_DECODE = -5,       /* llama.cpp could not run a batch; the engine was reset */
    PLD_E_ORDER = -6,        /* calls out of order (draft before prefill, ...); nothing was changed */
    PLD_E_MEMORY = -7,       /* an allocation failed */
    PLD_E_INTERNAL = -8      /* a fault of ours or of llama.cpp */
};

enum pld_kind {
    PLD_KIND_TARGET = 0,  /* an ordinary model */
    PLD_KIND_DFLASH = 1,  /* DFlash draft: picks from its own logits */
    PLD_KIND_DFLASH2 = 2, /* DFlash2 draft: convolutions and a selector over top-k candidates */
    PLD_KIND_OTHER = 3    /* a draft of a kind that is not run here (DSpark, EAGLE3, ...) */
};

/* How the layers of a model go to several GPUs. */
enum pld_split {
    PLD_SPLIT_NONE = 0,  /* all on main_gpu */
    PLD_SPLIT_LAYER = 1, /* whole layers */
    PLD_SPLIT_ROW = 2,   /* rows of each matrix, where the backend can */
    PLD_SPLIT_TENSOR = 3 /* parts of each tensor, computed side by side */
};

typedef struct pld_model pld_model;
typedef struct pld_engine pld_engine;

/* library ---------------------------------------------------------------------------------------------------------- */

int32_t pld_abi_version(void);
/* sizeof of a struct of this header by name, -1 for an unknown name. */
int32_t pld_struct_size(const char *name);
/* Start the backends once per process; safe to call again. */
int32_t pld_init(void);
const char *pld_last_error(void);

/* Build facts: "version", "upstream_commit", "patches", "options", "system_info". NULL for an unknown name. */
const char *pld_build_info(const char *name);
int32_t pld_supports_gpu(void);
int32_t pld_n_devices(void);
typedef struct pld_device_info {
    char name[64];
    char description[128];
    char backend[32];
    int32_t is_gpu;
    int64_t memory_free;  /* bytes */
    int64_t memory_total; /* bytes */
} pld_device_info;
int32_t pld_device(int32_t index, pld_device_info *out);

/* Kernels and captured graphs that this process has launched; 0 in a build without CUDA. */
int64_t pld_cuda_launches(void);
/* 1: forget what was noted and note each launch by its kernel from now on; 0: forget and stop. A captured graph's kernels
 * are noted when it is captured, its launches as "cudaGraphLaunch". */
void pld_cuda_trace(int32_t on);
/* Lines "<mangled name> <launches>"; a text function. */
int32_t pld_cuda_traced(char *buf, int32_t cap);

/* Logs. Lines go to a bounded ring; when it is full the oldest are dropped and counted. Levels are ggml's:
 * 1 debug, 2 info, 3 warn, 4 error. pld_log_next returns the line's length, or -1 when the ring is empty; *ours is 1 for a
 * line of this library's own, 0 for one of llama.cpp's. */
int32_t pld_log_set_level(int32_t level);
int32_t pld_log_next(int32_t *level, int32_t *ours, char *buf, int32_t cap);
int64_t pld_log_dropped(void);

/* models ----------------------------------------------------------------------------------------------------------- */

typedef struct pld_model_params {
    int32_t n_gpu_layers; /* -1: all */
    int32_t repack;       /* 1: weights may be laid out for this CPU's matrix units (AMX, interleaved rows) */
    int32_t header_only;  /* 1: read and check the header, load no weights; only the header functions work then */
    int32_t use_mmap;     /* 1: map the file where the devices can; 0: read it into memory */
    int32_t use_mlock;    /* 1: keep what lies in host memory from being swapped out; a system that refuses is warned of */
    int32_t split_mode;   /* enum pld_split */
    int32_t main_gpu;     /* with PLD_SPLIT_NONE: index among the devices of the one that holds the model */
    int32_t n_devices;    /* 0: all GPUs */
    int32_t n_split;      /* 0: by free memory; else the number of GPUs */
    int32_t devices[16];  /* indices for pld_device(): GPUs, or the CPU alone */
    float tensor_split[16]; /* each GPU's share of the model */
} pld_model_params;

typedef struct pld_model_info {
    int32_t kind; /* enum pld_kind */
    int32_t n_vocab;
    int32_t n_ctx_train;
    int32_t n_embd;
    int32_t n_layer;
    int32_t block_size;     /* drafts: tokens in a block, anchor included; else 0 */
    int32_t n_target_layers; /* drafts: layer inputs of the target that it reads; else 0 */
    int32_t target_layers[32];
    int32_t selector_rank;  /* DFlash2; else 0 */
    int32_t selector_top_k; /* DFlash2; else 0 */
    int32_t mask_token;     /* -1: none */
    int32_t own_embd;       /* 1: the file has token embeddings */
    int32_t own_head;       /* 1: the file has an output head */
    int32_t n_vocab_draft;  /* drafts with a reduced vocabulary (d2t, or dflash.draft_vocab for a shared head); else n_vocab */
    int32_t n_swa;          /* sliding window in tokens; 0: none */
    int32_t causal;         /* drafts: 1 if the block attends causally */
    int32_t bos;            /* -1: none */
    int32_t eos;            /* -1: none */
    int32_t add_bos;
    int32_t device;         /* index of the device that holds the output layer; -1 if only the header was opened */
    int64_t n_params;
    int64_t n_bytes; /* of all tensors */
} pld_model_info;

int32_t pld_model_open(const char *path, const pld_model_params *params, pld_model **out);
void pld_model_free(pld_model *model);
int32_t pld_model_get_info(const pld_model *model, pld_model_info *out);
/* Metadata: number of keys; key and value as text. PLD_E_ARGUMENT if absent. */
int32_t pld_model_n_meta(const pld_model *model);
int32_t pld_model_meta_key(const pld_model *model, int32_t index, char *buf, int32_t cap);
int32_t pld_model_meta(const pld_model *model, const char *key, char *buf, int32_t cap);
/* Text of a token as the file stores it; a text function. Headers suffice. */
int32_t pld_model_token(const pld_model *model, int32_t token, char *buf, int32_t cap);
typedef struct pld_tensor_info {
    char name[64];
    char type[16];  /* as "q4_0" */
    int64_t ne[4];  /* the row first */
    int64_t offset; /* in the file */
    int64_t n_params;
    int64_t n_bytes;
} pld_tensor_info;
/* Number of tensors, in the file's order; up to cap of them are written, none with out NULL. Headers suffice. */
int32_t pld_model_tensors(const pld_model *model, pld_tensor_info *out, int32_t cap);

/* PLD_OK if the draft belongs to the target, else PLD_E_PAIR with the first reason as the last error. Headers suffice. */
int32_t pld_model_check_pair(const pld_model *target, const pld_model *draft);
/* In what target and draft must agree. */
enum pld_aspect {
    PLD_ASPECT_KIND = 0,      /* one is a target, the other a draft that is run here */
    PLD_ASPECT_WIDTH = 1,     /* of the hidden state */
    PLD_ASPECT_LAYERS = 2,    /* the target has those that the draft reads */
    PLD_ASPECT_TOKENIZER = 3, /* each id is the same token */
    PLD_ASPECT_MASK = 4       /* the mask token */
};
/* A sentence with the fix on one aspect in which they do not agree, empty if they do; a text function. Headers suffice. */
int32_t pld_model_mismatch(const pld_model *target, const pld_model *draft, int32_t aspect, char *buf, int32_t cap);

/* Number of tokens needed (>= 0), written if they fit in cap. add_special: BOS/EOS as the model is configured.
 * parse_special: control tokens written out in the text become those tokens. */
int32_t pld_model_tokenize(const pld_model *model, const char *text, int32_t n_bytes, int32_t add_special,
                           int32_t parse_special, int32_t *tokens, int32_t cap);
/* Bytes of a token; may be part of a UTF-8 character. special: 1 to spell out control tokens. */
int32_t pld_model_piece(const pld_model *model, int32_t token, int32_t special, char *buf, int32_t cap);
/* 1 if the token ends generation, 0 if not. */
int32_t pld_model_is_eog(const pld_model *model, int32_t token);

/* quantising ------------------------------------------------------------------------------------------------------- */

/* A tensor type, by its number in GGUF files. */
typedef struct pld_tensor_type {
    char name[16];   /* "f32", "q4_0", "q4_K", ... */
    int32_t block;   /* weights that are stored together; a row has a multiple of them */
    int32_t n_bytes; /* of a block */
} pld_tensor_type;

/* PLD_E_ARGUMENT for a number that is no type. */
int32_t pld_get_tensor_type(int32_t type, pld_tensor_type *out);
/* The bytes that start a file with this model's metadata and its n tensors in these types; a text function. file_type is
 * written as general.file_type. The tensors' data follow in the same order, each padded with zeros to *alignment bytes.
 * Headers suffice. */
int32_t pld_quantize_header(const pld_model *model, const int32_t *types, int32_t n, int32_t file_type, int32_t *alignment,
                            char *buf, int32_t cap);
/* Convert rows of n_per_row weights; n_src and n_dst are bytes. PLD_E_LOAD for a weight that is not finite or beyond the
 * range of F16, unless F32 is made. */
int32_t pld_quantize_rows(int32_t from, int32_t to, int64_t n_per_row, int64_t n_rows, int32_t n_threads, const void *src,
                          int64_t n_src, void *dst, int64_t n_dst);

/* engines ---------------------------------------------------------------------------------------------------------- */

typedef struct pld_engine_params {
    int32_t n_ctx;      /* 0: as the target was trained */
    int32_t n_ubatch;   /* tokens in one prefill step */
    int32_t n_threads;  /* >= 1 */
    int32_t n_max;      /* widest draft that will be verified; -1: block_size-1, or 0 without a draft */
    int32_t flash_attn; /* -1 auto, 0 off, 1 on */
    int32_t type_k;     /* of pld_kv_type() */
    int32_t type_v;
    int32_t type_k_draft;
    int32_t type_v_draft;
    int32_t kv_unified; /* 1: one K/V buffer for all sequences; 0: one for each; no difference where there is one */
    int32_t cuda_graphs; /* -1 from compute capability 7.0 on, 0 never, 1 on any card */
    int32_t backend_argmax; /* 1: argmax in the graph, no logits are read back; 0: logits are read back */
    int32_t fused_draft;    /* 1: our own graph of the draft where it can run; 0: llama.cpp's, the reference */
    int32_t draft_vocab;    /* 1: our own graph reads only the head's rows that dflash.draft_vocab lists; 0: all */
    int32_t n_seq_max;      /* sequences that are kept side by side, each with n_ctx tokens; >= 1 */
    int32_t n_ctx_draft;    /* last positions that the draft sees of a sequence; 0: as many as it was trained on */
    int32_t few_shapes;     /* 1: batches get rows that nothing reads, so that they come in few shapes, whose graphs are kept;
                             * 0: not; -1: on a GPU. Never for a target whose state cannot be cut. */
    int32_t n_ctx_rope;     /* context by which a target with RoPE factors for a short and for a long one takes either; 0: n_ctx */
} pld_engine_params;

/* How the target's memory takes back tokens that were rejected. */
enum pld_rollback {
    PLD_ROLLBACK_CUT = 0,       /* the cache is cut at any position */
    PLD_ROLLBACK_SNAPSHOTS = 1, /* a recurrent state is kept for each token of a verify */
    PLD_ROLLBACK_CHECKPOINT = 2 /* the state before a verify is put back, and what was accepted is run again */
};

typedef struct pld_engine_info {
    int32_t n_ctx;
    int32_t n_ubatch;
    int32_t n_threads;
    int32_t n_max;        /* widest draft that verify takes */
    int32_t n_candidates; /* per drafted position; 0 without a draft */
    int32_t n_vocab;
    int32_t kind; /* of the draft; PLD_KIND_TARGET without one */
    int32_t backend_argmax;
    int32_t fused_draft; /* 1 if drafts come from our own graph */
    int32_t n_seq_max;
    int32_t n_ctx_draft; /* positions that the draft sees at most; 0 without a draft */
    int32_t rollback;    /* enum pld_rollback */
    int32_t few_shapes;  /* 1: a prompt of a few rounds' rows had best go along with the verify of other sequences */
} pld_engine_info;

/* Where a sequence stands; the last two are the engine's. */
typedef struct pld_engine_state {
    int32_t n_past;    /* tokens in the target's cache; the anchor is the token at this position */
    int32_t n_pending; /* prompt tokens that still wait for prefill */
    int32_t anchor;    /* token id, -1 before a prompt is prefilled */
    int32_t n_past_draft; /* positions whose features the draft holds, rows waiting to be injected included */
    int64_t n_injected; /* feature rows written into the draft's cache since the engine was opened */
    int64_t n_prefilled; /* prompt tokens evaluated by the target since the engine was opened */
} pld_engine_state;

/* What our own draft graph did; all zero without it. */
typedef struct pld_engine_memory {
    int32_t n_nodes;        /* of the graph launched last */
    int64_t n_graph_hits;   /* launches whose graph was there */
    int64_t n_graph_misses; /* launches whose graph had to be built */
} pld_engine_memory;

/* What lies in the memory of one device, in bytes. */
typedef struct pld_device_memory {
    char device[64];
    int32_t is_host;      /* 1: memory of the host, pinned, mapped or repacked */
    int64_t target_weights;
    int64_t draft_weights;
    int64_t target_kv;
    int64_t draft_kv;
    int64_t target_compute;
    int64_t draft_compute;
    int64_t mapped;       /* of the weights: mapped from the file, so the system can drop and read them again */
    int64_t memory_free;  /* of the device, as its backend sees it; a CPU's is all that it has */
    int64_t memory_total;
} pld_device_memory;

/* A graph of a small batch that is kept, built once: a verify of the target's, or a launch of our own draft graph. */
typedef struct pld_graph {
    int32_t draft;      /* 0: the target's, 1: the draft's */
    int32_t n_rows;     /* tokens of the batch, or of the block */
    int32_t n_injected; /* draft: rows of features that are written with it */
    int64_t n_hits;     /* how often it was run again */
    int64_t bytes;      /* of its own compute buffers; the draft's graphs share theirs */
} pld_graph;

/* What opening this pair would take, found by a dry run: no weight is read, nothing is allocated. Either file may be
 * NULL; params NULL: the weights alone. *n_ctx is the context's size with the default filled in. A draft without a target is
 * its weights and, with an n_ctx, its K/V cache. Up to cap rows are written; returns how many there are. */
int32_t pld_plan(const char *target, const pld_model_params *target_params, const char *draft,
                 const pld_model_params *draft_params, const pld_engine_params *params, int32_t *n_ctx,
                 pld_device_memory *out, int32_t cap);

/* A K/V cache type by name ("f16", "q8_0", ...), or -1. */
int32_t pld_kv_type(const char *name);

/* draft may be NULL: plain decoding on the same path. */
int32_t pld_engine_open(pld_model *target, pld_model *draft, const pld_engine_params *params, pld_engine **out);
void pld_engine_free(pld_engine *engine);
int32_t pld_engine_get_info(const pld_engine *engine, pld_engine_info *out);
int32_t pld_engine_get_state(const pld_engine *engine, int32_t seq, pld_engine_state *out);
int32_t pld_engine_get_memory(const pld_engine *engine, pld_engine_memory *out);
/* Number of devices in use, the CPU last; up to cap of them are written, none with out NULL. */
int32_t pld_engine_devices(const pld_engine *engine, pld_device_memory *out, int32_t cap);
/* Number of graphs kept; up to cap of them are written, none with out NULL. */
int32_t pld_engine_graphs(pld_engine *engine, pld_graph *out, int32_t cap);
/* Forget the cached tokens of a sequence, 0 to n_seq_max-1, or of all, and write zeros to their cells, with seq -1. */
int32_t pld_engine_reset(pld_engine *engine, int32_t seq);

/* Take a prompt of n >= 1 tokens, keep the cached prefix that it shares with what came before (n_reused tokens, features
 * of the draft included) and drop the rest. The last token becomes the anchor, the others wait for pld_engine_prefill. */
int32_t pld_engine_begin(pld_engine *engine, int32_t seq, const int32_t *tokens, int32_t n, int32_t *n_reused);
/* Evaluate up to n_ubatch waiting tokens; the number of tokens still waiting, or a negative status. */
int32_t pld_engine_prefill(pld_engine *engine, int32_t seq);

typedef struct pld_draft_request {
    int32_t seq;
    int32_t n_max; /* 0 to the engine's n_max, and at most block_size-1 */
    int32_t n_min; /* a draft shorter than this is dropped */
    float margin;  /* cut before the first token whose top-1 minus top-2 score is below this; 0: no cut */
    float p_min;   /* cut before the first token whose probability among the candidates is below this; 0: no cut */
} pld_draft_request;

/* Draft a block after the anchor of each sequence, in one launch; requests [n] by ascending seq. lengths [n]: tokens of each
 * draft, 0 included. A line of the arrays is as long as the engine's n_max, called w here: tokens [n, w], margins [n, w],
 * candidates and scores [n, w, n_candidates] by descending score. All but lengths and tokens may be NULL. */
int32_t pld_engine_draft(pld_engine *engine, const pld_draft_request *requests, int32_t n, int32_t *lengths, int32_t *tokens,
                         float *margins, int32_t *candidates, float *scores, int64_t *t_us);

typedef struct pld_verify_request {
    int32_t seq;
    int32_t n; /* drafted tokens, 0 to the engine's n_max; 0 while the sequence's prompt waits */
} pld_verify_request;

typedef struct pld_verdict {
    int32_t n_accepted; /* drafted tokens that equal the target's own choice */
    int32_t bonus;      /* the target's token after them: the new anchor; -1 for a prompt */
    int32_t n_pending;  /* tokens of the prompt that still wait */
} pld_verdict;

/* Run [anchor, tokens...] of each sequence through the target in one launch, accept of each the longest prefix that equals its
 * argmax, roll back the rest; requests [n] by ascending seq, w the engine's n_max, tokens [n, w]. chosen [n, w+1]: the target's
 * argmax at each row (rows after n_accepted follow a rejected token); may be NULL. margins [n, w+1]: top-1 minus top-2 logit
 * of each row; NULL with backend_argmax. verdicts [n]. Room in each sequence: n_past + 1 + n <= n_ctx.
 * A prompt that waits goes along: as many rows of it as the widest of the others has. Prompts alone share a launch, too, with
 * up to n_ubatch tokens of all. */
int32_t pld_engine_verify(pld_engine *engine, const pld_verify_request *requests, int32_t n, const int32_t *tokens,
                          int32_t *chosen, float *margins, pld_verdict *verdicts, int64_t *t_us);
/* Logits [n_vocab] of a row of the last verify, if that was of one sequence; needs backend_argmax = 0. */
int32_t pld_engine_logits(const pld_engine *engine, int32_t row, float *out);

/* Tokens in the cache of a sequence: their number; up to cap of them are written, none with out NULL. */
int32_t pld_engine_tokens(const pld_engine *engine, int32_t seq, int32_t *out, int32_t cap);
/* What is kept of a sequence, as bytes: its tokens, anchor, the target's memory and the draft's. Prompt tokens that wait for
 * prefill are not part of it, and the last verify's logits are gone after. Bytes needed, or a negative status: PLD_E_ORDER
 * without cached tokens. */
int64_t pld_engine_state_size(pld_engine *engine, int32_t seq);
/* n: what pld_engine_state_size said, nothing done in between. */
int32_t pld_engine_state_get(pld_engine *engine, int32_t seq, uint8_t *out, int64_t n);
/* Put it in place of what is kept of a sequence, in an engine on the same models; n_ctx may differ. Whatever is refused leaves
 * the sequence empty: PLD_E_LOAD for bytes that are damaged or none of these, PLD_E_ARGUMENT for those of other models or
 * options, PLD_E_CONTEXT_FULL for more tokens than n_ctx. Other sequences lose theirs only with "does not fit". */
int32_t pld_engine_state_set(pld_engine *engine, int32_t seq, const uint8_t *data, int64_t n);

/* What a draft would read of a target: run n tokens through it in a context of their own, out [n, n_embd] takes the input of
 * that layer. PLD_E_PAIR if models of its kind do not show it. */
int32_t pld_model_layer_input(pld_model *model, const int32_t *tokens, int32_t n, int32_t layer, float *out);
