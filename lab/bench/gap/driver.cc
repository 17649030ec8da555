// Runs kernels of the GAP benchmark (sbeamer/gapbs on GitHub, not part of this repository) on a graph file, from
// given sources, and writes what they find, so that other programs can be compared with them vertex by vertex.
//
//   g++ -std=c++11 -O3 -fopenmp -I gapbs/src driver.cc -o gap_driver              bfs, cc, pr on NAME.sg
//   g++ -std=c++11 -O3 -fopenmp -I gapbs/src -DWEIGHTED driver.cc -o gap_sssp     sssp on NAME.wsg
//
//   gap_driver NAME.sg FOLDER SOURCE...
//   gap_sssp NAME.wsg FOLDER DELTA SOURCE...
//
// Prints a line a trial: kernel, source (or -1), seconds. In FOLDER: bfs.0 (parents from the first source, int32),
// cc.0 (int32), pr.0 (float32), sssp.0 (int32). Each kernel runs once before it is timed.
#ifdef WEIGHTED
#define main gap_main
#include "sssp.cc"
#undef main
#else
#define main gap_main_bfs
#include "bfs.cc"
#undef main
#define main gap_main_cc
#include "cc.cc"
#undef main
#define main gap_main_pr
#include "pr.cc"
#undef main
#endif
#include <cstdio>
#include <cstdlib>

const int kTrials = 5; // of kernels without a source

template <typename T> static void Write(const string &folder, const char *name, const pvector<T> &found) {
    FILE *file = fopen((folder + "/" + name).c_str(), "wb");
    if (file == nullptr || fwrite(found.data(), sizeof(T), found.size(), file) != found.size()) {
        perror(name);
        exit(1);
    }
    fclose(file);
}

template <typename Kernel>
static void Measure(const string &folder, const char *name, const vector<long> &sources, Kernel kernel) {
    Write(folder, (string(name) + ".0").c_str(), kernel(static_cast<NodeID>(sources[0])));
    for (long source : sources) {
        Timer timer;
        timer.Start();
        auto found = kernel(static_cast<NodeID>(source));
        timer.Stop();
        printf("%s %ld %.9f\n", name, source, timer.Seconds());
        fflush(stdout);
    }
}

int main(int argc, char *argv[]) {
#ifdef WEIGHTED
    const int first = 4;
#else
    const int first = 3;
#endif
    if (argc <= first) {
        fprintf(stderr, "usage: see the head of driver.cc\n");
        return 2;
    }
    char name[] = "gap", option[] = "-f";
    char *given[] = {name, option, argv[1], nullptr};
    CLBase cli(3, given);
    if (!cli.ParseArgs())
        return 2;
    const string folder = argv[2];
    vector<long> sources, none(kTrials, -1);
    for (int k = first; k < argc; k++)
        sources.push_back(atol(argv[k]));
#ifdef WEIGHTED
    const WeightT delta = atoi(argv[3]);
    WeightedBuilder builder(cli);
    WGraph g = builder.MakeGraph();
    Measure(folder, "sssp", sources, [&](NodeID s) { return DeltaStep(g, s, delta); });
#else
    Builder builder(cli);
    Graph g = builder.MakeGraph();
    Measure(folder, "bfs", sources, [&](NodeID s) { return DOBFS(g, s); });
    Measure(folder, "cc", none, [&](NodeID) { return Afforest(g); });
    Measure(folder, "pr", none, [&](NodeID) { return PageRankPullGS(g, 20, 1e-4); });
#endif
    return 0;
}
