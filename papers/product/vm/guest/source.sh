#!/bin/sh
# Prints the program that the measured guest compiles: four functions that differ.
for number in $(seq 4); do
    cat <<END
unsigned mix$number(unsigned *words, unsigned count, unsigned seed)
{
    unsigned sum = seed * ${number}7u;
    for (unsigned i = 0; i < count; i++) {
        if (words[i] & $number)
            sum += words[i] >> ($number % 13);
        else
            sum = (sum << 5) - sum + words[i] * seed;
        switch ((sum + i) % 7) {
        case 1: words[i] ^= sum; break;
        case 3: seed += words[(i * $number) % count]; break;
        case 5: sum -= seed / (words[i] | 1); break;
        default: sum ^= $number;
        }
    }
    return sum ^ seed;
}
END
done
