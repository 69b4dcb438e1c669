/*
 * The begin of the hypervisor in hypervisor.c, and the program of its guest. It is the ROM of a machine: the
 * processor starts at its last 16 bytes, in 16-bit mode, and this brings it to C in 64-bit mode, at a copy of the ROM
 * in memory.
 */

#define ROM 0xffff0000
#define COPY 0x100000
#define ROM_BYTES 0x10000
/* Where the processors other than the first start: a page, in 16-bit mode. */
#define OTHERS 0x8000
/* Page tables of the hypervisor itself: four GiB where they are. */
#define TABLES 0x80000
/* The stack of the first processor; those of the others are below it. */
#define STACK 0xa0000
#define STACK_BYTES 0x2000
#define OFFSET(symbol) ((symbol) - COPY)

	.section .text, "ax"

	.code16
start16:
	cli
	lgdtl %cs:OFFSET(rom_segments_pointer)
	movl %cr0, %eax
	orb $1, %al
	movl %eax, %cr0
	ljmpl $8, $(ROM + OFFSET(start32))

	.code32
start32:
	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	cld
	movl $ROM, %esi
	movl $COPY, %edi
	movl $(ROM_BYTES / 4), %ecx
	rep movsl
	movl $bss_start, %edi
	movl $bss_end, %ecx
	subl %edi, %ecx
	xorl %eax, %eax
	rep stosb
	movl $TABLES, %edi
	movl $(0x2000 / 4), %ecx
	rep stosl
	movl $(TABLES + 0x1000 + 3), TABLES
	movl $0x83, %eax
	movl $(TABLES + 0x1000), %edi
gib:	movl %eax, (%edi)
	addl $8, %edi
	addl $0x40000000, %eax
	cmpl $(TABLES + 0x1000 + 4 * 8), %edi
	jb gib
	movl $others_start, %esi
	movl $OTHERS, %edi
	movl $(others_end - others_start), %ecx
	rep movsb
to_64_bits:
	movl $TABLES, %eax
	movl %eax, %cr3
	/* Physical addresses of more than 32 bits, and VMX. */
	movl $0x2020, %eax
	movl %eax, %cr4
	/* Long mode. */
	movl $0xc0000080, %ecx
	rdmsr
	orl $0x100, %eax
	wrmsr
	/* Paging, native floating-point errors (VMX wants them), protected mode. */
	movl $0x80000031, %eax
	movl %eax, %cr0
	lgdt segments_pointer
	ljmpl $24, $start64

	.code64
start64:
	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	/* Processors have numbers in the order of their start. */
	movl $1, %edi
	lock xaddl %edi, processors
	movl %edi, %eax
	imull $STACK_BYTES, %eax, %eax
	movl $STACK, %esp
	subl %eax, %esp
	call run
halt:	hlt
	jmp halt

	/* The begin of the other processors, at OTHERS. */
	.code16
others_start:
	cli
	lgdtl %cs:others_segments_pointer - others_start
	movl %cr0, %eax
	orb $1, %al
	movl %eax, %cr0
	ljmpl $8, $others32
others_segments_pointer:
	.word 47
	.long segments
others_end:
	.code32
others32:
	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	jmp to_64_bits
	.code64

/*
 * long enter(struct registers *guest, long is_launched): runs the guest until its next exit. Returns 0 then, and else
 * what VMX said: 1, or 2 with an error in the VMCS.
 */
	.globl enter, exited
enter:
	pushq %rbx
	pushq %rbp
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	pushq %rdi
	movq $0x6c14, %rax	/* The host's rsp. */
	vmwrite %rsp, %rax
	testq %rsi, %rsi
	movq 0(%rdi), %rax
	movq 8(%rdi), %rcx
	movq 16(%rdi), %rdx
	movq 24(%rdi), %rbx
	movq 32(%rdi), %rsi
	movq 40(%rdi), %rdi
	jnz 1f
	vmlaunch
	jmp 2f
1:	vmresume
2:	movl $1, %eax
	jc 3f
	movl $2, %eax
3:	popq %rdi
	jmp 4f
exited:
	pushq %rdi
	movq 8(%rsp), %rdi
	movq %rax, 0(%rdi)
	movq %rcx, 8(%rdi)
	movq %rdx, 16(%rdi)
	movq %rbx, 24(%rdi)
	movq %rsi, 32(%rdi)
	popq 40(%rdi)
	popq %rdi
	xorl %eax, %eax
4:	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbp
	popq %rbx
	ret

/*
 * The program of the guest, which begins with esi = random number, edi = number to begin with, and ebx = writes in a
 * step. It writes a number that was never written before to the first word of a page, and calls the hypervisor after
 * each step. A page is the product of two random numbers, so that some are written much more often than others; a
 * multiplication by an odd number scatters them over the memory.
 */
	.code32
	.globl guest_start, guest_end
guest_start:
	movl %ebx, %ecx
2:	imull $1664525, %esi, %esi
	addl $1013904223, %esi
	movl %esi, %eax
	movl %esi, %edx
	shrl $20, %eax
	shrl $8, %edx
	andl $0xfff, %edx
	imull %edx, %eax
	shrl $9, %eax
	imull $12345, %eax, %eax
	shll $12, %eax
	andl $0x7fff000, %eax
	incl %edi
	movl %edi, GUEST_DATA(%eax)
	decl %ecx
	jnz 2b
	vmcall
	jmp guest_start
guest_end:

	.balign 8
	/* Flat segments: of 32 bits, of data, of 64 bits; a task that VMX wants to be named. */
segments:
	.quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00af9b000000ffff, 0x00008b0000000067, 0
segments_pointer:
	.word . - segments - 1
	.long segments
rom_segments_pointer:
	.word 47
	.long ROM + OFFSET(segments)
processors:
	.long 0

	.section .reset, "ax"
	.code16
	jmp start16
