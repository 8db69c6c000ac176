-- Take the first of some lanes that no other has.
--
-- KEYS[1]   lane-holder-fence  integer: raised by every claim of a lane
-- KEYS[2..] lane-holder:{lane} of each candidate
-- ARGV[1]   owner: a name unique to the process      ARGV[2]  Slurm job of the owner      ARGV[3]  its node
-- ARGV[4]   lease in ms     ARGV[5..]  the candidates' names
--
-- Returns {index, token}: the candidate that was taken, counted from 0, and what stands in its key; {-1, ''} when
-- none is free. The token carries the fence, so an earlier holder's token never becomes valid again.
--@include clock
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then
    local token = cjson.encode({
      lane = ARGV[i + 3], owner = ARGV[1], job = ARGV[2], node = ARGV[3],
      fence = redis.call('INCR', KEYS[1]), since_ms = math.floor(clock_ms()),
    })
    redis.call('SET', KEYS[i], token, 'PX', ARGV[4])
    return {i - 2, token}
  end
end
return {-1, ''}
