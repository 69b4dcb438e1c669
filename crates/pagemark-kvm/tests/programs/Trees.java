// Threads that fill the heap, faults that the virtual machine turns into exceptions, and tables.

import java.util.*;
import java.util.concurrent.*;

public class Trees {
    static class Node {
        Node left, right;
    }

    static Node tree(int depth) {
        Node node = new Node();
        if (depth > 0) {
            node.left = tree(depth - 1);
            node.right = tree(depth - 1);
        }
        return node;
    }

    static int count(Node node) {
        return node == null ? 0 : 1 + count(node.left) + count(node.right);
    }

    static int endless(int depth) {
        return endless(depth + 1) + 1;
    }

    public static void main(String[] arguments) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(4);
        List<Future<Integer>> counts = new ArrayList<>();
        for (int i = 0; i < 40; i++)
            counts.add(threads.submit(() -> {
                int sum = 0;
                for (int round = 0; round < 5; round++)
                    sum += count(tree(14));
                return sum;
            }));
        long sum = 0;
        for (Future<Integer> count : counts)
            sum += count.get();
        System.out.println(sum);
        for (int i = 0; i < 3; i++) {
            try {
                Object none = null;
                none.toString();
            } catch (NullPointerException error) {
                System.out.println("no object");
            }
            try {
                endless(0);
            } catch (StackOverflowError error) {
                System.out.println("no stack");
            }
        }
        Map<String, Integer> table = new TreeMap<>();
        for (int i = 0; i < 300000; i++)
            table.merge("key " + i % 1000, i, Integer::sum);
        System.out.println(table.hashCode());
        Process child = new ProcessBuilder("/bin/echo", "a child").inheritIO().start();
        System.out.println(child.waitFor());
        threads.shutdown();
    }
}
