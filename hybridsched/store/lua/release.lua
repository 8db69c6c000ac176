-- Give back a claimed request that was not run (a worker that stops, an engine that failed before it sent
-- anything). The caller says whether the attempt counts. A cancelled or expired one is answered instead; one
-- whose client has seen tokens cannot be given back and fails.
--
-- KEYS 1 its hash   2 its stream   3 the first reply stream   4 replicas hash of its model   5 and more: its other
--   reply streams
-- ARGV 1 prefix   2 consumer   3 entry id   4 replica that gives it back (it is not the one woken)
--      5 how long a result is kept, ms   6 life of the reply stream after this, ms   7 its MAXLEN
--      8 1: the attempt counts, 0: it does not
-- Returns released | cancelled | expired | failed | lost (not the caller's any more) | "=" and the
--   reply streams to use instead, apart by spaces.
--@include clock
--@include entries
--@include replicas
--@include answer
--@include requeue

local keys = {req = KEYS[1], stream = KEYS[2], replies = {KEYS[3]}}
for i = 5, #KEYS do
  keys.replies[i - 3] = KEYS[i]
end
local entry, limits = ARGV[3], {keep_ms = ARGV[5], reply_ttl_ms = ARGV[6], maxlen = ARGV[7]}
if not held_by(keys.stream, entry, ARGV[2], 0) then
  return 'lost'
end
local elsewhere = moved(keys.req, keys.replies)
if elsewhere then
  return '=' .. elsewhere
end
local found = redis.call('XRANGE', keys.stream, entry, entry)[1]
if not found then
  return 'lost'
end
local flat = found[2]
local id, attempt = field(flat, 'id'), tonumber(field(flat, 'attempt'))
local now = clock_ms()
local word, result = ended(keys, flat, now, 'stopped')
if word then
  answer(keys, entry, id, attempt, result, limits)
  return word
end
requeue(keys, entry, flat, attempt + tonumber(ARGV[8]))
wake(KEYS[4], ARGV[1], least_loaded(KEYS[4], now, ARGV[4]))
return 'released'
