/* Length of a module's image, because functions that load images take an address without a length. Images are ELF
 * files, fat binaries, their wrappers, and PTX text.
 *
 * This file uses only libc. The caller's bytes may be anything: each offset and length is checked against `most` before
 * its use. `most` is the size of a file, or WW_IMAGE_MOST if only an address is known; then this file cannot check
 * whether the memory is mapped, and neither can the driver.
 */
#include "calls.h"
#include "gen_calls.h"
#include <elf.h>
#include <string.h>

int ww_image_length(const void *image, size_t most, const void **start, size_t *nbytes);

#define WRAPPER 0x466243b1u /* struct wrapper */
#define FAT 0xba55ed50u     /* struct fat */

struct wrapper {
    uint32_t magic, version;
    const void *data, *unused;
};

struct fat {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t nbytes; /* after the header */
};

/* Raise *end to the end of a part of the image; return 0 if the part exceeds `most`. */
static int reach(uint64_t offset, uint64_t nbytes, size_t most, uint64_t *end) {
    if (offset > most || nbytes > most - offset)
        return 0;
    if (offset + nbytes > *end)
        *end = offset + nbytes;
    return 1;
}

static int elf_length(const unsigned char *image, size_t most, size_t *nbytes) {
    Elf64_Ehdr h;
    uint64_t end = sizeof h;
    if (most < sizeof h)
        return CUDA_ERROR_INVALID_IMAGE;
    memcpy(&h, image, sizeof h);
    if (h.e_ident[EI_CLASS] != ELFCLASS64 || h.e_ident[EI_DATA] != ELFDATA2LSB)
        return CUDA_ERROR_INVALID_IMAGE;
    if ((h.e_shnum && h.e_shentsize != sizeof(Elf64_Shdr)) || (h.e_phnum && h.e_phentsize != sizeof(Elf64_Phdr)))
        return CUDA_ERROR_INVALID_IMAGE;
    if (!reach(h.e_shoff, (uint64_t)h.e_shnum * sizeof(Elf64_Shdr), most, &end) ||
        !reach(h.e_phoff, (uint64_t)h.e_phnum * sizeof(Elf64_Phdr), most, &end))
        return CUDA_ERROR_INVALID_IMAGE;
    for (unsigned i = 0; i < h.e_shnum; i++) {
        Elf64_Shdr s;
        memcpy(&s, image + h.e_shoff + i * sizeof s, sizeof s);
        if (s.sh_type != SHT_NOBITS && s.sh_type != SHT_NULL && !reach(s.sh_offset, s.sh_size, most, &end))
            return CUDA_ERROR_INVALID_IMAGE;
    }
    for (unsigned i = 0; i < h.e_phnum; i++) {
        Elf64_Phdr p;
        memcpy(&p, image + h.e_phoff + i * sizeof p, sizeof p);
        if (p.p_type != PT_NULL && !reach(p.p_offset, p.p_filesz, most, &end))
            return CUDA_ERROR_INVALID_IMAGE;
    }
    *nbytes = end;
    return 0;
}

static int fat_length(const void *image, size_t most, size_t *nbytes) {
    struct fat h;
    if (most < sizeof h)
        return CUDA_ERROR_INVALID_IMAGE;
    memcpy(&h, image, sizeof h);
    if (h.header_bytes < sizeof h || h.header_bytes > most || h.nbytes > most - h.header_bytes)
        return CUDA_ERROR_INVALID_IMAGE;
    *nbytes = h.header_bytes + h.nbytes;
    return 0;
}

/* Length of PTX text with its terminating zero byte, which is sent, too. */
static int text_length(const unsigned char *text, size_t most, size_t *nbytes) {
    if (!*text)
        return CUDA_ERROR_INVALID_IMAGE;
    for (int i = 0; i < 4 && text[i]; i++)
        if ((text[i] < ' ' || text[i] > '~') && !strchr("\t\n\v\f\r", text[i]))
            return CUDA_ERROR_INVALID_IMAGE;
    size_t n = strnlen((const char *)text, most);
    if (n == most)
        return CUDA_ERROR_INVALID_IMAGE;
    *nbytes = n + 1;
    return 0;
}

/* Find the first byte and the length of an image. Return 0 or INVALID_IMAGE. */
int ww_image_length(const void *image, size_t most, const void **start, size_t *nbytes) {
    uint32_t magic;
    *start = image;
    if (!*(const unsigned char *)image)
        return CUDA_ERROR_INVALID_IMAGE;
    if (strnlen(image, 4) < 4) /* a short text */
        return text_length(image, most, nbytes);
    memcpy(&magic, image, sizeof magic);
    if (magic == WRAPPER) {
        struct wrapper w;
        memcpy(&w, image, sizeof w);
        if (most < WW_IMAGE_MOST || w.version != 1 || !w.data) /* in a file, `data` is not an address */
            return CUDA_ERROR_INVALID_IMAGE;
        *start = w.data;
        memcpy(&magic, w.data, sizeof magic);
        return magic == FAT ? fat_length(w.data, most, nbytes) : CUDA_ERROR_INVALID_IMAGE;
    }
    if (magic == FAT)
        return fat_length(image, most, nbytes);
    if (!memcmp(image, ELFMAG, SELFMAG))
        return elf_length(image, most, nbytes);
    return text_length(image, most, nbytes);
}
