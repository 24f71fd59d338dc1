# Checks whose failure says what to do next, and the steps of the build that need more than a line.

# pip builds in a folder that is kept: without this an option given once in CMAKE_ARGS would stay for ever.
function(forget_earlier_arguments)
    string(REGEX MATCHALL "-D[A-Za-z0-9_]+" _now "$ENV{CMAKE_ARGS}")
    foreach(_name IN LISTS PYLLAMA_DFLASH_LAST_ARGUMENTS)
        if(NOT _name IN_LIST _now)
            string(SUBSTRING "${_name}" 2 -1 _name)
            unset(${_name} CACHE)
        endif()
    endforeach()
    set(PYLLAMA_DFLASH_LAST_ARGUMENTS "${_now}" CACHE INTERNAL "options that CMAKE_ARGS set in the last run")
endfunction()

function(reject_renamed_options)
    foreach(_pair
            LLAMA_CUBLAS:GGML_CUDA LLAMA_CUDA:GGML_CUDA GGML_CUBLAS:GGML_CUDA LLAMA_NATIVE:GGML_NATIVE
            LLAMA_CUDA_FORCE_MMQ:GGML_CUDA_FORCE_MMQ LLAMA_AVX:GGML_AVX
            LLAMA_AVX2:GGML_AVX2 LLAMA_AVX512:GGML_AVX512 LLAMA_FMA:GGML_FMA LLAMA_F16C:GGML_F16C
            LLAMA_OPENMP:GGML_OPENMP LLAMA_LTO:GGML_LTO CUDA_ARCHITECTURES:CMAKE_CUDA_ARCHITECTURES
            GGML_CUDA_ARCHITECTURES:CMAKE_CUDA_ARCHITECTURES)
        string(REPLACE ":" ";" _pair "${_pair}")
        list(GET _pair 0 _old)
        list(GET _pair 1 _new)
        if(DEFINED ${_old})
            set(_value "${${_old}}")
            unset(${_old} CACHE)  # or the next try in this build folder would fail on it again
            message(FATAL_ERROR "-D${_old} is not an option here.\nnext: use -D${_new}=${_value}")
        endif()
    endforeach()
endfunction()

function(reject_unsupported_options)
    foreach(_name BUILD_SHARED_LIBS GGML_BACKEND_DL GGML_STATIC GGML_CPU_ALL_VARIANTS)
        if(${_name})
            unset(${_name} CACHE)
            message(FATAL_ERROR "-D${_name}=ON does not go with one shared library that hides llama.cpp in it.\n"
                "next: leave it out")
        endif()
    endforeach()
    foreach(_name METAL BLAS VULKAN SYCL HIP MUSA CANN OPENCL RPC WEBGPU ZDNN ZENDNN HEXAGON OPENVINO VIRTGPU ET)
        string(TOLOWER "ggml-${_name}" _folder)
        if(GGML_${_name} AND NOT EXISTS "${PYLLAMA_DFLASH_LLAMA_DIR}/ggml/src/${_folder}/CMakeLists.txt")
            unset(GGML_${_name} CACHE)
            message(FATAL_ERROR "-DGGML_${_name}=ON: this backend is not tested here, so its source is not fetched.\n"
                "next: use GGML_CUDA or the CPU, or build from a full tree with -DPYLLAMA_DFLASH_LLAMA_DIR=PATH")
        endif()
    endforeach()
endfunction()

# A misspelt option would be ignored in silence; one that upstream declares has lost this help text by now.
function(reject_unknown_options)
    get_cmake_property(_names CACHE_VARIABLES)
    foreach(_name IN LISTS _names)
        get_property(_help CACHE ${_name} PROPERTY HELPSTRING)
        if(_name MATCHES "^(GGML|LLAMA|PYLLAMA)_" AND _help MATCHES "^No help, variable specified"
                AND NOT _name MATCHES "^(GGML_CUDA_DEBUG|GGML_CUDA_CUB_3DOT2|GGML_CPU_ARM_ARCH|LLAMA_CURL)$")
            unset(${_name} CACHE)  # or the next try in this build folder would fail on it again
            message(FATAL_ERROR "-D${_name}: there is no such option.\n"
                "next: check its spelling against CMakeLists.txt and vendor/llama.cpp/ggml/CMakeLists.txt")
        endif()
    endforeach()
endfunction()

# A macro: Python_EXECUTABLE must reach the caller's scope, where scikit-build-core may have set it.
macro(sync_llama_tree)
    file(GLOB _patches CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/vendor/patches/*.patch")
    file(GLOB _scripts "${CMAKE_CURRENT_SOURCE_DIR}/vendor/*.py")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
        ${_patches} ${_scripts} "${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp.lock")
    find_package(Python 3.9 REQUIRED COMPONENTS Interpreter)
    execute_process(
        COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/vendor/vendor.py" sync
        OUTPUT_VARIABLE _synced OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed)
    if(_failed)
        message(FATAL_ERROR "vendor/vendor.py sync failed; its message above says what to do next")
    endif()
    message(STATUS "${_synced}")
endmacro()

# Say in the library what it was built from; a tree without our stamp is somebody else's.
function(read_llama_stamp _tree)
    set(PLD_UPSTREAM_COMMIT "unknown" PARENT_SCOPE)
    set(PLD_PATCHES "unknown" PARENT_SCOPE)
    if(NOT EXISTS "${_tree}/.vendor-stamp.json")
        return()
    endif()
    file(READ "${_tree}/.vendor-stamp.json" _json)
    string(JSON _commit GET "${_json}" commit)
    string(JSON _count LENGTH "${_json}" patches)
    set(_names "")
    while(_count GREATER 0)
        math(EXPR _count "${_count} - 1")
        string(JSON _name MEMBER "${_json}" patches ${_count})
        string(REGEX REPLACE "\\.patch$" "" _name "${_name}")
        list(PREPEND _names "${_name}")
    endwhile()
    string(REPLACE ";" "," _names "${_names}")
    set(PLD_UPSTREAM_COMMIT "${_commit}" PARENT_SCOPE)
    set(PLD_PATCHES "${_names}" PARENT_SCOPE)
endfunction()

function(install_licences _tree)
    foreach(_file LICENSE licenses/LICENSE-jsonhpp)
        if(EXISTS "${_tree}/${_file}")
            get_filename_component(_name "${_file}" NAME)
            install(FILES "${_tree}/${_file}" DESTINATION pyllama_dflash/licenses RENAME "llama.cpp-${_name}" COMPONENT pyllama_dflash)
        endif()
    endforeach()
endfunction()
